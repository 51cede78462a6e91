"""Plans of a training step within a memory budget, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from stepscope.records.decoding import Int64
from stepscope.records.schema import Part

PLANNED = "planned.json"
"""File of a plan that a script's process writes, a `FittedStep`."""
FAILED = "failed"
"""File with the reason why there is none."""


AS_IT_IS = "save everything"
"""A block that stays as it is, in words."""


class BlockSettings(Part, frozen=True, omit_defaults=True):
    """How a block saves what its backward pass needs. As it is without `recompute`."""

    recompute: bool = False
    kept: tuple[tuple[str, Int64], ...] = ()
    """Operators whose outputs are saved: the name, and how often it was called before."""
    offload: bool = False
    """Whether kept outputs and inputs are copied to host memory."""
    inputs: tuple[Int64, ...] = ()
    is_random: bool = True


class BlockGroup(Part, frozen=True):
    """Blocks of one plan; bytes and seconds are those of each."""

    number: Int64
    words: str
    saved: Int64
    """Bytes on the device from its forward to its backward pass, besides inputs and outputs."""
    to_host: Int64
    again_s: float
    """Time of recomputation."""


class Plan(Part, frozen=True):
    """A plan of a step, with what is predicted of it."""

    peak: Int64
    seconds: float
    again_s: float
    """Of them, for recomputation."""
    exposed_s: float
    """Of them, for copies to and from host memory that the step does not hide."""
    groups: tuple[BlockGroup, ...]
    micro_batches: Int64 = 1
    host_states: Int64 = 0
    """Bytes of optimizer states that are in host memory between updates."""

    @property
    def to_host(self) -> int:
        return sum(group.number * group.to_host for group in self.groups)

    @property
    def is_plain(self) -> bool:
        """Whether the step stays as it is."""
        changed = any(group.words != AS_IT_IS for group in self.groups)
        return not (changed or self.host_states or self.micro_batches > 1)

    @property
    def words(self) -> str:
        parts = [f"{group.number} × {group.words}" for group in self.groups]
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches")
        if self.host_states:
            parts.append("optimizer states in host memory")
        return "; ".join(parts)


class Application(Part, frozen=True):
    """What applies a plan to a model: settings of its blocks by name."""

    settings: tuple[BlockSettings, ...]
    blocks: dict[str, Int64]
    """Index of the settings of each block that does not stay as it is."""
    host_states: bool = False


class Frontier(Part, frozen=True):
    """The plans than which no other is faster and smaller, the fastest first. With several ranks
    those of one of them."""

    plans: tuple[Plan, ...]
    device: str
    """The device at whose rates times are predicted."""
    ranks: Int64 = 1
    sharding: str = "none"


class PlannedStep(Part, frozen=True):
    """Plans of a recorded step, or of one with a larger batch or a longer context."""

    what: Literal["step", "batch", "context"]
    size: Int64
    """Length of the first dimension of the batch, or of the second for a context."""
    frontier: Frontier
    plan: Plan | None
    """The fastest plan that leaves enough of the device's memory; None if there is none."""
    apply: Application | None
    largest: Int64 = 0
    """Of a batch: the largest one that fits as it is; 0 if none does or it is unknown."""


ATTACHMENT = "plans"
"""Attachment of a recorded step, a tuple of `PlannedStep`."""
Planned = tuple[PlannedStep, ...]


class FittingBatch(Part, frozen=True):
    """A batch that fits into a budget."""

    batch: Int64
    peak_bytes: Int64
    blocks: str = ""
    """The plan of the blocks; empty for a step as it is."""

    def __str__(self) -> str:
        return f"batch {self.batch}{self.blocks and f' with a plan, {self.blocks}'}"


class FittedStep(Part, frozen=True):
    """The fastest plan of a script's step within a budget."""

    frontier: Frontier
    budget: Int64
    plan: Plan
    apply: Application
    model: str
    """Name of the model's class."""
    batch: Int64 = 0
    """Length of the first dimension of the model's inputs; 0 if they differ."""
    is_estimate: bool = False
    """Whether kernels of the compiler were assumed."""
    assumed: tuple[str, ...] = ()
    """Lines of code that read a value which is not known."""


class MeasuredSteps(Part, frozen=True):
    """Steps of a script in a process of its own."""

    step_ms: float
    peak: Int64 | None
    """None on a CPU, which has no allocator to ask."""


T = TypeVar("T")


def thinned(plans: Sequence[T], most: int) -> tuple[T, ...]:
    """Return at most so many plans, with the fastest and the smallest."""
    if len(plans) <= most:
        return tuple(plans)
    return tuple(plans[round(i * (len(plans) - 1) / (most - 1))] for i in range(most))
