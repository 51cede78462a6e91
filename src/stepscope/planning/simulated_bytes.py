"""Bytes of fake tensors in the blocks of a simulated caching allocator of CUDA."""

from __future__ import annotations

from typing import Any

import torch

from stepscope.analysis.predict.allocator import Block, CachingAllocator
from stepscope.measure.ledger import StorageLedger
from stepscope.measure.tensors import LiveStorage, TensorBytes

WORKSPACE = 64 << 20
"""Bytes that cuBLAS requests from the allocator on a Hopper GPU: once in the thread of the forward
pass, and once in that of the backward pass."""


class SimulatedBytes(TensorBytes):  # type: ignore[no-untyped-call]
    """Counts fake tensors and the blocks that they occupy."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(torch.device("cpu"), *arguments)
        self.blocks = CachingAllocator()
        self._occupied: dict[LiveStorage, Block] = {}

    def made(self, size: int, operator: str) -> LiveStorage:
        storage = super().made(size, operator)
        if size:
            self._occupied[storage] = self.blocks.allocate(size)
        return storage

    def freed(self, storage: LiveStorage) -> None:
        block = self._occupied.pop(storage, None)
        if block is not None:
            self.blocks.release(block)
        super().freed(storage)

    def begin_part(self) -> int:
        """Forget the peak, and return the bytes now."""
        self.blocks.most = self.blocks.in_use
        return self.blocks.in_use

    def size_of(self, storage: int) -> int:
        """Return the bytes of a storage, 0 if it is freed."""
        block = self._occupied.get(self._live[storage]) if storage in self._live else None
        return 0 if block is None else block.size


class PredictedLedger(SimulatedBytes, StorageLedger):  # type: ignore[no-untyped-call]
    """Memory ledger of fake tensors."""

    def __init__(self) -> None:
        super().__init__(_Statistics(self), WORKSPACE)

    def forget_peaks(self) -> None:
        self._peaks.clear()


class _Statistics:
    """The blocks of a ledger, as it reads them of CUDA's allocator."""

    def __init__(self, ledger: SimulatedBytes) -> None:
        self._ledger = ledger

    def allocated(self) -> int:
        return self._ledger.blocks.in_use + WORKSPACE

    def peak(self) -> int:
        return self._ledger.blocks.most + WORKSPACE

    def reset_peak(self) -> None:
        self._ledger.begin_part()

    def requested(self) -> int:
        return self._ledger.now + WORKSPACE
