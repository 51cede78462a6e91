"""Bytes of the tensors that live, counted at the dispatcher: on any device, to the byte.

An allocator's statistics exist for CUDA only. Here every operator's result is seen as it is made,
and its storage is counted until it dies; what existed before is counted when it is named.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class LiveStorage:
    """One storage that lives: its bytes, who made it, and the line of the account it is on."""

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
"""Methods that give the tensors which hold the numbers of one that has no storage of its own."""


def stored(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose storages hold its numbers: itself, or its parts. None where a library
    keeps them to itself."""
    if tensor.layout is torch.strided:
        return [tensor]
    with torch.no_grad(), _disable_current_modes():
        return [getattr(tensor, part)() for part in _PARTS.get(tensor.layout, ())]


class TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages on one device while it is entered.

    A tensor that an operator makes and frees within itself is not seen.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = device.type
        self._live: dict[int, LiveStorage] = {}
        self.now = 0
        self.peak = 0

    def count(self, tensors: Iterable[torch.Tensor], line: str = "") -> None:
        """Tensors that were made outside, or that belong on another line from now on."""
        for tensor in tensors:
            for held in self._see(tensor, ""):
                self.move(held, line)

    def move(self, held: LiveStorage, line: str) -> None:
        held.line = line

    def reset_peak(self) -> None:
        self.peak = self.now

    def held(self, tensor: torch.Tensor) -> list[LiveStorage]:
        """The storages of a tensor that are known."""
        keys = (part.untyped_storage()._cdata for part in stored(tensor))
        return [self._live[key] for key in keys if key in self._live]

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        del types
        self.aside(self.before)
        result = function(*arguments, **(keywords or {}))
        self.aside(self.after, function, arguments, keywords or {}, result)
        return result

    def aside(self, note: Callable[..., None], *given: Any) -> None:
        """All that is done here within the program that is counted."""
        note(*given)

    def before(self) -> None:
        """Called ahead of every operator."""

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
            held = self._live[key] = self.made(storage.nbytes(), operator)
            self.now += held.bytes
            weakref.finalize(storage, self._forget, key)
        return self._live[key]

    def _forget(self, key: int) -> None:
        held = self._live.pop(key)
        self.now -= held.bytes
        self.freed(held)

    def made(self, size: int, operator: str) -> LiveStorage:
        return LiveStorage(size, operator, "")

    def freed(self, held: LiveStorage) -> None:
        """Called when a storage has died."""
