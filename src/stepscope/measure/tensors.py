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


class TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages on one device while it is entered.

    A tensor that an operator makes and frees within itself is not seen: where PyTorch computes an
    operator out of others in C++ below the dispatcher, its inner tensors are no part of the count.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = device.type
        self._live: dict[int, int] = {}
        self.now = 0
        self.peak = 0
        self.peak_operator = ""
        self.largest = (0, "")
        """Bytes of the largest single tensor made, and the operator that made it."""

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors that were made outside."""
        for tensor in tensors:
            self._see(tensor, "")

    def reset_peak(self) -> None:
        self.peak = self.now

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
        return result

    def _see(self, tensor: torch.Tensor, operator: str) -> None:
        if tensor.device.type != self._kind:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = storage.nbytes()
        self._live[key] = size
        self.now += size
        weakref.finalize(storage, self._forget, key)
        if size > self.largest[0]:
            self.largest = (size, operator)
        if self.now > self.peak:
            self.peak, self.peak_operator = self.now, operator

    def _forget(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)
