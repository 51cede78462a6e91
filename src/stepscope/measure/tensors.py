"""Exact bytes of live tensors on any device, counted at the dispatcher.

Allocator statistics exist for CUDA only. Here the result of every operator is seen when it is
created, and its storage is counted until it is freed; tensors that existed before are added with
`count`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from stepscope.measure.dispatch import Observer


class LiveStorage:
    """A live storage: its bytes, the operator that created it, and its line in the ledger."""

    __slots__ = ("bytes", "line", "operator")

    def __init__(self, size: int, operator: str, line: str) -> None:
        self.bytes = size
        self.operator = operator
        self.line = line


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.jagged: ("values", "offsets"),
}
"""Methods that return the component tensors of a layout without a storage of its own."""


def stored(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors with the storages of this tensor: itself or its components; empty for layouts whose
    components are not accessible."""
    if tensor.layout is torch.strided:
        return [tensor]
    with torch.no_grad(), _disable_current_modes():
        return [getattr(tensor, part)() for part in _PARTS.get(tensor.layout, ())]


class TensorBytes(Observer):  # type: ignore[no-untyped-call]
    """Counts the live storages on one device while it is active.

    A tensor that an operator creates and frees internally is not seen.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._kind = device.type
        self._live: dict[int, LiveStorage] = {}
        self.now = 0
        self.peak = 0

    def count(self, tensors: Iterable[torch.Tensor], line: str = "") -> None:
        """Count tensors that were created outside, or move tensors to another line."""
        for tensor in tensors:
            for storage in self._see(tensor, ""):
                self.move(storage, line)

    def move(self, storage: LiveStorage, line: str) -> None:
        storage.line = line

    def reset_peak(self) -> None:
        self.peak = self.now

    def storages_of(self, tensor: torch.Tensor) -> list[LiveStorage]:
        """The counted storages of a tensor."""
        keys = (part.untyped_storage()._cdata for part in stored(tensor))
        return [self._live[key] for key in keys if key in self._live]

    def after(
        self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        del arguments, keywords
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, str(function))
        self.peak = max(self.peak, self.now)

    def _see(self, tensor: torch.Tensor, operator: str) -> list[LiveStorage]:
        if tensor.device.type != self._kind:
            return []
        return [self._see_storage(part.untyped_storage(), operator) for part in stored(tensor)]

    def _see_storage(self, storage: torch.UntypedStorage, operator: str) -> LiveStorage:
        key = storage._cdata
        if key not in self._live:
            entry = self._live[key] = self.made(storage.nbytes(), operator)
            self.now += entry.bytes
            weakref.finalize(storage, self._forget, key)
        return self._live[key]

    def _forget(self, key: int) -> None:
        storage = self._live.pop(key)
        self.now -= storage.bytes
        self.freed(storage)

    def made(self, size: int, operator: str) -> LiveStorage:
        return LiveStorage(size, operator, "")

    def freed(self, storage: LiveStorage) -> None:
        """Called when a storage has been freed."""
