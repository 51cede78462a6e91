"""Casts of weights that a captured step reads, because its update writes them with the weights.

A graph cannot notice that a weight was written through `.data`, between two replays or within the
step: no version counter shows it. Before each replay a digest of every weight is compared with that
of its cast. It samples one in 257 entries of a large weight; a sector has 8 float32 entries, so it
reads 1/32 of the memory. The comparison waits for the device once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from stepscope.acceleration.optimizer import FusedUpdate
from stepscope.kernels.weight_copies import WeightCopies, WrittenCast

_STRIDE = 257
"""Odd, so that the samples of the rows are in different columns."""
_COMPLETE = 1 << 14
"""Entries of a weight up to which all are compared."""


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

    def written(self) -> Digests:
        """Return the digests of the casts that are current: after a capture, those that each replay
        leaves current."""
        return Digests([cast for copies in self._copies for cast in copies.written_casts()])


class Digests:
    """Digests of weights and of their casts."""

    def __init__(self, casts: Sequence[WrittenCast]) -> None:
        self._pairs: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        self._bounded: list[tuple[Tensor, Tensor]] = []
        for weight, copy, is_amax in casts:
            if not weight.numel():
                continue
            flat = weight.is_contiguous() and (is_amax or copy.is_contiguous())
            sample = _sample(weight, flat)
            if is_amax:
                self._bounded.append((sample, copy))
            else:
                self._pairs.setdefault(copy.dtype, []).append((sample, _sample(copy, flat)))

    @torch.no_grad()
    def differ(self) -> bool:
        """Return whether a weight is not that of its cast, or exceeds its largest magnitude."""
        for dtype, pairs in self._pairs.items():
            weights, copies = (torch.cat(list(some)) for some in zip(*pairs, strict=True))
            if not torch.equal(weights.to(dtype), copies):
                return True
        if not self._bounded:
            return False
        weights, bounds = (
            torch.stack(torch._foreach_norm(list(some), ord=float("inf"))).float()
            for some in zip(*self._bounded, strict=True)
        )
        return not bool((weights <= bounds).all())


def _sample(tensor: Tensor, flat: bool) -> Tensor:
    """Return a view of some entries: the first one of each row if it is not `flat` in memory."""
    if not flat:
        index: tuple[Any, ...] = (slice(None), *[0] * (tensor.dim() - 1))
        return tensor.detach()[index]
    return tensor.detach().view(-1)[:: 1 if tensor.numel() <= _COMPLETE else _STRIDE]


def _copies_of(optimizer: Any) -> WeightCopies | None:
    fused = getattr(vars(optimizer).get("_init_group"), "__self__", None)
    copies = fused.copies if isinstance(fused, FusedUpdate) else getattr(optimizer, "_copies", None)
    return copies if isinstance(copies, WeightCopies) else None
