"""The running program of a trial, as the changes see it. Needs no torch.

A change asks for what all of them share (compilation, autocast, CUDA graphs, …); anything else it
patches itself, and counts where it took effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol


class Program(Protocol):
    """A training program before its first step, with torch imported."""

    applied: Counter[str]
    """Number of times that each setting took effect."""

    def is_on(self, setting: str) -> bool:
        """Return False while a switchable setting is taken back."""
        ...

    def autocast(self, dtype: str) -> None:
        """Run the model and the loss under autocast."""
        ...

    def fuse_attention(self) -> None:
        """Replace naive attention by PyTorch's fused kernels."""
        ...

    def fuse_optimizers(self) -> None:
        """Use fused implementations of the optimizers."""
        ...

    def use_foreach(self) -> None:
        """Use foreach in optimizers that loop over tensors."""
        ...

    def compile(self, mode: str) -> None:
        """Compile the `model`, each `block`, or the model with CUDA `graphs`."""
        ...

    def checkpoint_blocks(self) -> None:
        """Recompute the activations of each block in the backward."""
        ...

    def follow_memory_plan(self, plan: str) -> None:
        """Let the blocks of the model follow a plan, an `Application` as JSON."""
        ...

    def accelerate(self, dtype: str | None = None) -> None:
        """Apply `stepscope.accelerate` to every model."""
        ...

    def batch_siblings(self) -> None:
        """Run modules of a list as one batch, if a loop calls them with the same input."""
        ...

    def with_models(self, setting: str, change: Callable[[Any], int]) -> None:
        """Change every model that is trained, once it is known, and count what was changed."""
        ...

    def run_as_train_step(self) -> None:
        """Run the loop as a `stepscope.TrainStep`."""
        ...


Make = Callable[[Program, str], None]
"""Makes a setting, with its value, in a running program."""


class Setting(NamedTuple):
    """A setting of a trial, and how it is made."""

    make: Make
    values: tuple[str, ...] = ()
    """The values that it has; empty for any."""
    switchable: bool = False
    """A running program can take it back and make it again: it is made in every call that
    `Program.is_on` allows."""
    counted: bool = True
    """Had no effect if `Program.applied` has not counted it."""
    without: str = "nothing in the script could be changed"
    """Reason why it had no effect."""


SETTINGS: dict[str, list[Setting]] = {}


def setting(
    name: str,
    *values: str,
    switchable: bool = False,
    counted: bool = True,
    without: str = Setting._field_defaults["without"],
) -> Callable[[Make], Make]:
    """Register how a setting is made; see `Setting`."""

    def register(make: Make) -> Make:
        SETTINGS.setdefault(name, []).append(Setting(make, values, switchable, counted, without))
        return make

    return register


def switchable(settings: Iterable[str]) -> bool:
    """Return True if a running program can usually take all of these settings back. Optimizers can
    tell themselves."""
    return all(
        name == "optimizer" or any(one.switchable for one in SETTINGS.get(name, ()))
        for name in settings
    )


def setting_of(name: str, value: str) -> Setting:
    """Return how the setting is made with this value."""
    return next(one for one in SETTINGS[name] if not one.values or value in one.values)
