"""Masks that have the same values in every call, and which of them are causal.

Whether a mask is causal shows in its values, and reading them waits for the device, which a capture
does not allow. A mask that a module creates from sizes alone (`torch.ones(n, n).tril()`), or from
its buffers, is the same in every call: its values are read once. Any other mask is read in every
step, and in a capture it stays a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten

from stepscope.acceleration.attention.masks import CausalMasks, Filled
from stepscope.torch_tools.capturing import is_capturing

_CREATE = {"ones", "zeros", "full", "arange"}
_FROM_SHAPE = {"ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"}
_DERIVE = {
    "tril", "triu", "eq", "ne", "gt", "ge", "lt", "le", "logical_not", "bitwise_not", "invert",
    "to", "bool", "float", "type", "view", "reshape", "expand", "unsqueeze", "squeeze",
    "transpose", "getitem", "masked_fill", "where", "mul", "sub", "rsub", "neg",
}  # fmt: skip
_NAMES = _CREATE | _FROM_SHAPE | _DERIVE
_VALUES = (int, float, bool, str, torch.dtype, torch.device, type(None), type(...))
_MAX_KNOWN = 1024


class _Source(NamedTuple):
    """A view of memory with these values. While the weak reference exists, no other storage has its
    identity."""

    storage: StorageWeakRef
    version: int
    layout: tuple[Any, ...]

    @classmethod
    def of(cls, x: Tensor) -> _Source:
        storage = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
        layout = (x.dtype, x.shape, x.stride(), x.storage_offset())
        return cls(storage, -1 if x.is_inference() else x._version, layout)


class KnownMasks:
    """Which masks are causal, by how they were computed or by where they are in memory."""

    def __init__(self) -> None:
        self._masks = CausalMasks(max_inspected=None)
        self._known: dict[tuple[Any, ...], bool] = {}

    def look_up(self, key: tuple[Any, ...], inspect: Callable[[CausalMasks], bool]) -> bool:
        """Return what is known of a mask, or inspect it; in a capture it is not causal then."""
        if key not in self._known:
            if is_capturing():
                return False
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = inspect(self._masks)
        return self._known[key]


class MasksOfCall:
    """The masks of one call of a module, and how they were computed from sizes and buffers."""

    def __init__(self, known: KnownMasks, buffers: Iterable[Tensor]) -> None:
        self._known = known
        self._buffers = {StorageWeakRef(b.untyped_storage()) for b in buffers}  # type: ignore[no-untyped-call]
        self._noted: dict[int, tuple[Tensor, tuple[Any, ...], int]] = {}
        """By identity, with the tensor and its version."""

    def note(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note how the result was computed, if it has the same values in every such call."""
        name = _noted_name(function)
        if not name or not isinstance(result, Tensor) or result.is_inference():
            return
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.requires_grad:
            return
        leaves, tree = tree_flatten((args, kwargs))
        parts = [self._part(leaf, name in _FROM_SHAPE) for leaf in leaves]
        if None not in parts:
            self._noted[id(result)] = (result, (name, str(tree), *parts), result._version)

    def computed_as(self, x: Tensor) -> tuple[Any, ...] | None:
        """Return how a tensor was computed from sizes and buffers; None if that is not known."""
        if id(x) not in self._noted:
            return None
        _, computation, version = self._noted[id(x)]
        return computation if version == x._version else None

    def causal_together(self, filled: Sequence[Filled], added: Sequence[Tensor]) -> bool:
        """Return whether these are exactly one causal mask."""
        masks = [*(mask for mask, _ in filled), *added]
        if len(masks) != 1 or masks[0].requires_grad:
            return False
        kind = "hidden" if filled else "added"
        return self._look_up(kind, masks[0], lambda all_: all_.causal_together(filled, added))

    def causal(self, allowed: Tensor) -> bool:
        """Return whether a mask is causal; `allowed` is True where a query sees a key."""
        return self._look_up("visible", allowed, lambda all_: all_.causal(allowed))

    def _look_up(self, kind: str, mask: Tensor, inspect: Callable[[CausalMasks], bool]) -> bool:
        if mask.layout != torch.strided:
            return False
        return self._known.look_up((kind, self.computed_as(mask) or _Source.of(mask)), inspect)

    def _part(self, leaf: Any, shape_only: bool) -> object | None:
        if isinstance(leaf, Tensor):
            if shape_only:
                return leaf.shape, leaf.dtype, leaf.device
            known = self.computed_as(leaf)
            if known is not None or leaf.layout != torch.strided:
                return known
            source = _Source.of(leaf)
            return source if source.storage in self._buffers else None
        if isinstance(leaf, slice):
            bounds = (leaf.start, leaf.stop, leaf.step)
            return ("slice", *bounds) if all(type(b) in (int, type(None)) for b in bounds) else None
        return (type(leaf), leaf) if type(leaf) in _VALUES else None


@lru_cache(1024)
def _noted_name(function: Any) -> str:
    """Return the name of a function whose results are noted; empty for any other."""
    name: str = getattr(function, "__name__", "").strip("_")
    return name if name in _NAMES else ""
