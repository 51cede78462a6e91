"""Launches of the fused AdamW kernel: one per device and combination of dtypes, for all tensors.

An optimizer describes a step as a list of `TensorUpdate`; `FusedLaunches` caches what the launches
read from step to step. Step counts are either on the host, or on the device, where a captured step
can advance them:

    launches.prepare(updates)  # outside of a capture: creates what the launches read
    with torch.cuda.graph(graph):
        launches.update_with_device_counts(updates)
    graph.replay()
    launches.refresh()  # after a change of the learning rate, between two replays
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from stepscope.optim.adamw import Rule
from stepscope.torch_tools.triton_available import HAS_TRITON, is_interpreted, supports_dtype

if TYPE_CHECKING:
    from stepscope.optim.device_settings import DeviceSettings
    from stepscope.optim.triton_adamw import Row, Settings, Table, TensorDtypes

    Key = tuple[torch.device, TensorDtypes]

_LARGEST_SEED = (1 << 31) - 1


class Copies(Protocol):
    """Copies of weights in another dtype, such as `kernels.weight_copies.WeightCopies`."""

    def find(self, weight: Tensor) -> Tensor | None: ...

    def written(self, weight: Tensor) -> None:
        """Record that the copy returned by `find` has been written together with the weight."""

    def amax_buffer(self, weight: Tensor, block: int) -> Tensor | None:
        """Return where the update writes the largest magnitude of each block of that many values of
        the weight; None if nothing reads it."""

    def amax_written(self, weight: Tensor) -> None:
        """Record that this buffer belongs to the current values of the weight."""


class TensorUpdate(NamedTuple):
    """One weight in a step: what the kernel reads and writes."""

    weight: Tensor
    """The weight of the model; its version counter is advanced."""
    parameter: Tensor
    """The tensor that the rule updates: the weight, or its master copy."""
    gradient: Tensor
    mean: Tensor
    square: Tensor
    copy: Tensor | None
    """A second tensor to which the updated values are written."""
    state: dict[str, Tensor]
    """State of the parameter, with its step count."""
    group: dict[str, Any]
    """Parameter group with the hyperparameters."""
    amax: Tensor | None = None
    """Largest magnitudes of the blocks of the weight, which the kernel writes."""
    keeps_count: bool = False
    """True if the step count is a device tensor that other code advances too: it is not replaced
    by one of `FusedLaunches`."""

    @property
    def key(self) -> Key:
        from stepscope.optim.triton_adamw import TensorDtypes

        copy_dtype = self.copy.dtype if self.copy is not None else None
        return self.parameter.device, TensorDtypes(
            self.parameter.dtype, self.gradient.dtype, self.mean.dtype, copy_dtype
        )

    def row(self, settings: int) -> Row:
        """Return the row of a table for this tensor, with that row of the settings."""
        from stepscope.optim.triton_adamw import Row

        return Row(
            self.parameter.data_ptr(),
            self.gradient.data_ptr(),
            self.mean.data_ptr(),
            self.square.data_ptr(),
            self.copy.data_ptr() if self.copy is not None else 0,
            self.parameter.numel(),
            settings,
            self.amax.data_ptr() if self.amax is not None else 0,
        )


class CapturableLaunch(NamedTuple):
    """Device tables that every replay of a captured launch reads."""

    table: Table
    settings: DeviceSettings
    groups: tuple[dict[str, Any], ...]
    """Parameter group of each row of the table."""


class FusedLaunches:
    """The launches of one optimizer, cached from step to step."""

    def __init__(self, copies: Copies | None = None) -> None:
        self._copies = copies
        self.tables: dict[Key, Table] = {}
        self.launches: dict[Key, CapturableLaunch] = {}
        self.captured: list[CapturableLaunch] = []
        """Launches that replays of a captured step read: they outlive a change of the gradients."""

    def copy_of(self, weight: Tensor) -> Tensor | None:
        """Return the copy that the kernel can write together with the weight."""
        copy = self._copies.find(weight) if self._copies is not None else None
        if copy is None or not copy.is_contiguous() or not supports_dtype(copy.dtype):
            return None
        return copy

    def amax_of(self, weight: Tensor, parameter: Tensor) -> Tensor | None:
        """Return where the kernel writes the largest magnitudes of a weight. A weight with a master
        copy, or of which the parameter is a part, has none."""
        if self._copies is None or parameter is not weight:
            return None
        from stepscope.optim.triton_adamw import BLOCK

        return self._copies.amax_buffer(weight, BLOCK)

    def mark_written(self, update: TensorUpdate, amax: bool = True) -> None:
        """Record that a kernel writes the weight and its copy: torch does not see it. `amax`: also
        its largest magnitudes, which are unknown after a step that may have been skipped."""
        torch.autograd.graph.increment_version(update.weight)
        # A weight with a master copy is itself the second tensor.
        has_copy = update.copy is not None and update.copy is not update.weight
        if self._copies is not None and has_copy:
            self._copies.written(update.weight)
        if self._copies is not None and update.amax is not None and amax:
            self._copies.amax_written(update.weight)

    def update_with_host_counts(
        self, updates: Sequence[TensorUpdate], *, stochastic: bool = False, seed: int = 0
    ) -> None:
        """Advance the step counts on the host and update all tensors. With `stochastic`, bfloat16
        moments are rounded stochastically; the random numbers follow from `seed` and the step."""
        gathered: dict[Key, list[Row]] = {}
        settings: dict[Settings, int] = {}
        step_seed = seed
        for update in updates:
            self.mark_written(update)
            steps = update.state["step"].add_(1).item()
            step_seed = seed + int(steps)
            settings_row = settings.setdefault(_settings(update.group, steps), len(settings))
            gathered.setdefault(update.key, []).append(update.row(settings_row))
        for (device, dtypes), rows in gathered.items():
            self._launch(
                device, dtypes, tuple(rows), list(settings), stochastic=stochastic, seed=step_seed
            )

    def update_with_device_counts(
        self, updates: Sequence[TensorUpdate], skip: Tensor | None = None
    ) -> None:
        """Advance the step counts on the device and update all tensors. If the device tensor `skip`
        is not zero, nothing is updated and no step is counted."""
        launches = self.prepare(updates)
        for update in updates:
            self.mark_written(update, amax=skip is None)
        for (device, dtypes), launch in launches.items():
            skip_here = None if skip is None else skip.to(device, non_blocking=True)
            launch.settings.advance(skip_here)
            with _on(device):
                launch.table.update(launch.settings.rows, dtypes, skip=skip_here)

    def prepare(self, updates: Sequence[TensorUpdate]) -> dict[Key, CapturableLaunch]:
        """Return tables and settings of these updates, reused where they match."""
        gathered: dict[Key, list[TensorUpdate]] = {}
        for update in updates:
            gathered.setdefault(update.key, []).append(update)
        return {key: self._launch_for(key, together) for key, together in gathered.items()}

    def refresh(self) -> None:
        """Copy the hyperparameters of the groups into the settings that a captured step reads."""
        for launch in (*self.launches.values(), *self.captured):
            launch.settings.set_rules(rules(launch.groups))

    def _launch(
        self,
        device: torch.device,
        dtypes: TensorDtypes,
        rows: tuple[Row, ...],
        settings: list[Settings],
        *,
        stochastic: bool,
        seed: int,
    ) -> None:
        from stepscope.optim.triton_adamw import Table, sent

        table = self.tables.get((device, dtypes))
        # The caching allocator gives gradients the same addresses, step after step.
        if table is None or table.rows != rows:
            table = self.tables[device, dtypes] = Table(rows, device, table)
        with _on(device):
            table.update(
                sent(torch.tensor(settings, dtype=torch.float32), device),
                dtypes,
                stochastic=stochastic and dtypes.moments == torch.bfloat16,
                seed=seed % _LARGEST_SEED,
            )

    def _launch_for(self, key: Key, updates: list[TensorUpdate]) -> CapturableLaunch:
        from stepscope.optim.device_settings import DeviceSettings
        from stepscope.optim.triton_adamw import Table

        device, launch = key[0], self.launches.get(key)
        rows = tuple(update.row(number) for number, update in enumerate(updates))
        groups = tuple(update.group for update in updates)
        same_counts = (
            launch is not None
            and len(launch.groups) == len(groups)
            and all(
                update.state["step"] is steps
                for update, steps in zip(updates, launch.settings.steps, strict=True)
            )
            # load_state_dict creates new groups.
            and all(known is group for known, group in zip(launch.groups, groups, strict=True))
        )
        matches = launch is not None and same_counts and launch.table.rows == rows
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if launch is None or not matches:
                raise RuntimeError(
                    "the fused update has not seen these gradients: call prepare() before the"
                    " capture"
                )
            self.captured.append(launch)
            return launch
        if launch is None or not matches:
            if launch is not None and same_counts:
                settings = launch.settings
            else:
                settings = DeviceSettings(self._counts(updates), rules(groups), device)
            for update, steps in zip(updates, settings.steps, strict=True):
                update.state["step"] = steps
            launch = self.launches[key] = CapturableLaunch(
                Table(rows, device, launch.table if launch else None), settings, groups
            )
        launch.settings.set_rules(rules(groups))
        return launch

    def _counts(self, updates: list[TensorUpdate]) -> list[float | Tensor]:
        """Return the step counts; the tensor itself if other code or a captured step advances
        it."""
        captured = {id(steps) for launch in self.captured for steps in launch.settings.steps}
        return [
            update.state["step"]
            if update.keeps_count or id(update.state["step"]) in captured
            else float(update.state["step"])
            for update in updates
        ]


def rules(groups: tuple[dict[str, Any], ...]) -> tuple[Rule, ...]:
    return tuple(Rule.of(group) for group in groups)


def kernel_takes(parameter: Tensor, gradient: Tensor) -> bool:
    if not HAS_TRITON or gradient.is_sparse or gradient.device != parameter.device:
        return False
    dtypes = (parameter.dtype, gradient.dtype)
    if not all(map(supports_dtype, dtypes)) or not parameter.numel():
        return False
    if not (parameter.is_contiguous() and gradient.is_contiguous()):
        return False
    if parameter.is_neg() or gradient.is_neg():
        # The memory of a lazily negated tensor has the other sign.
        return False
    return parameter.is_cuda or is_interpreted()


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _settings(group: dict[str, Any], steps: float) -> Settings:
    from stepscope.optim.triton_adamw import Settings

    rule = Rule.of(group)
    return Settings.of(rule, rule.lr / (1 - rule.beta1**steps), math.sqrt(1 - rule.beta2**steps))
