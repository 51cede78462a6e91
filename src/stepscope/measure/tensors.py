"""Bytes of the tensors that live, counted at the dispatcher: on any device, to the byte.

An allocator's statistics exist for CUDA only. Here every operator's result is seen as it is made,
and its storage is counted until it dies; what existed before is counted when it is named.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held:
    """One storage that lives: its bytes, who made it, and the line of the account it is on."""

    __slots__ = ("bytes", "line", "operator")

    def __init__(self, size: int, operator: str, line: str) -> None:
        self.bytes = size
        self.operator = operator
        self.line = line


class TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages on one device while it is entered.

    A tensor that an operator makes and frees within itself is not seen.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = device.type
        self._live: dict[int, Held] = {}
        self.now = 0
        self.peak = 0

    def count(self, tensors: Iterable[torch.Tensor], line: str = "") -> None:
        """Tensors that were made outside, or that belong on another line from now on."""
        for tensor in tensors:
            held = self._see(tensor, "")
            if held is not None:
                self.move(held, line)

    def move(self, held: Held, line: str) -> None:
        held.line = line

    def reset_peak(self) -> None:
        self.peak = self.now

    def held(self, tensor: torch.Tensor) -> Held | None:
        return self._live.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        del types
        result = function(*arguments, **(keywords or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, str(function))
        self.peak = max(self.peak, self.now)
        return result

    def _see(self, tensor: torch.Tensor, operator: str) -> Held | None:
        if tensor.device.type != self._kind:
            return None
        storage = tensor.untyped_storage()
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

    def made(self, size: int, operator: str) -> Held:
        return Held(size, operator, "")

    def freed(self, held: Held) -> None:
        """Called when a storage has died."""
