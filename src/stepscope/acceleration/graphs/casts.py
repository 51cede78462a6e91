"""Casts of weights that a captured step reads, because its update writes them with the weights.

A graph cannot notice that a weight was written through `.data`, between two replays or within the
step: no version counter shows it. Before each replay samples of every weight are compared with
those of its cast, and all casts are repeated if one differs: by kernels on the device, so that the
host does not wait for the replay before. One in 257 entries of a large weight is compared; a sector
has 8 float32 entries, so that 1/32 of the memory is read. When the host learns of a difference, the
step is captured again, with its casts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from stepscope.acceleration.optimizer import FusedUpdate
from stepscope.kernels.launch import kernels_take
from stepscope.kernels.weight_copies import WeightCopies, WrittenCast

_STRIDE = 257
"""Odd, so that the samples of the rows are in different columns."""
_COMPLETE = 1 << 14
"""Entries of a weight up to which all are compared."""

_CALLS_BETWEEN_COPIES = 8
"""Replays after which the host learns whether casts had to be repeated."""


class Casts:
    """The casts that the optimizers of a step can write."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        found = (_copies_of(optimizer) for optimizer in optimizers)
        # Casts that are always cached are refreshed by the caller.
        unkept = {id(one): one for one in found if one is not None and not one.keeps}
        self._copies = list(unkept.values())

    @contextmanager
    def kept(self, *, read: bool) -> Iterator[None]:
        """Let optimizers write the casts, and layers `read` them."""
        with ExitStack() as stack:
            for copies in self._copies:
                stack.enter_context(copies.kept(read=read))
            yield

    def refresh(self) -> None:
        """Cast again what a capture would read as it is."""
        for copies in self._copies:
            copies.refresh_current()

    def written(self) -> WrittenCasts:
        """Return the casts that are current: after a capture, those that each replay leaves
        current."""
        return WrittenCasts([cast for copies in self._copies for cast in copies.written_casts()])


class WrittenCasts:
    """Casts that each replay of a graph reads and leaves current."""

    def __init__(self, casts: Sequence[WrittenCast]) -> None:
        known = [one for one in casts if one.weight.numel()]
        self._flat = [one for one in known if _is_flat(one)]
        self._rest = [one for one in known if not _is_flat(one)]
        """Casts in another order in memory, which are repeated in any case."""
        self._compared: Callable[[], bool] = partial(_repeated_if_stale, self._flat)
        if self._flat and self._flat[0].weight.is_cuda and kernels_take(*_tensors(self._flat)):
            self._compared = _OnDevice(self._flat)
        self.were_stale = False
        """Whether a weight had been written: known some calls later on a GPU."""

    @torch.no_grad()
    def refresh(self) -> None:
        """Repeat the casts if a weight has been written since the last replay."""
        for one in self._rest:
            _repeat(one)
        self.were_stale |= bool(self._flat) and self._compared()


class _OnDevice:
    """Compares and repeats casts without waiting for the device."""

    def __init__(self, casts: Sequence[WrittenCast]) -> None:
        from stepscope.optim.stale_casts import Cast, Table

        groups: dict[object, list[Cast]] = {}
        for weight, copy, is_amax in casts:
            one = Cast(weight, copy, is_amax, _distance(weight))
            groups.setdefault((weight.dtype, copy.dtype, is_amax), []).append(one)
        self._casts = casts
        self._tables = [Table(group) for group in groups.values()]
        device = casts[0].weight.device
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)
        self._seen = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._calls = 0

    def __call__(self) -> bool:
        from stepscope.optim.stale_casts import recast_if_stale

        self._calls += 1
        recast_if_stale(self._flag, self._tables, self._calls)
        if self._calls % _CALLS_BETWEEN_COPIES == 0:
            self._seen.copy_(self._flag, non_blocking=True)
        return bool(self._seen)


def _repeated_if_stale(casts: Sequence[WrittenCast]) -> bool:
    """Repeat all casts if one is not that of its weight; return whether it was so."""
    stale = not all(map(_is_current, casts))
    if stale:
        for one in casts:
            _repeat(one)
    return stale


def _is_current(cast: WrittenCast) -> bool:
    weight = cast.weight.detach().view(-1)[:: _distance(cast.weight)]
    if cast.is_amax:
        return bool(weight.abs().max() <= cast.copy.max())
    copy = cast.copy.detach().view(-1)[:: _distance(cast.weight)]
    return torch.equal(weight.to(copy.dtype), copy)


def _repeat(cast: WrittenCast) -> None:
    cast.copy.copy_(cast.weight.abs().max() if cast.is_amax else cast.weight)


def _is_flat(cast: WrittenCast) -> bool:
    return cast.weight.is_contiguous() and cast.copy.is_contiguous()


def _tensors(casts: Iterable[WrittenCast]) -> list[Tensor]:
    return [x for one in casts for x in (one.weight, one.copy)]


def _distance(weight: Tensor) -> int:
    return 1 if weight.numel() <= _COMPLETE else _STRIDE


def _copies_of(optimizer: Any) -> WeightCopies | None:
    fused = getattr(vars(optimizer).get("_init_group"), "__self__", None)
    copies = fused.copies if isinstance(fused, FusedUpdate) else getattr(optimizer, "_copies", None)
    return copies if isinstance(copies, WeightCopies) else None
