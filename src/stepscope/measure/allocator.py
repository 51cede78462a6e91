"""Statistics of CUDA's caching allocator and driver, and memory snapshots with Python stacks."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from stepscope.files import replacing
from stepscope.records.memory import Standing

HISTORY_ENTRIES = 200_000
"""Maximum allocations and frees in a recording; a step of the largest size has a tenth of that."""


class Statistics(Protocol):
    """Bytes of an allocator, as a memory ledger reads them."""

    def allocated(self) -> int: ...

    def peak(self) -> int: ...

    def reset_peak(self) -> None: ...

    def requested(self) -> int: ...


class CudaAllocator:
    """The statistics of one device's caching allocator, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return int(self._all("allocated_bytes")["current"])

    def peak(self) -> int:
        return int(self._all("allocated_bytes")["peak"])

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def requested(self) -> int:
        """Bytes requested from the allocator; its blocks are larger."""
        return int(self._all("requested_bytes")["current"])

    def reserved(self) -> int:
        return int(self._all("reserved_bytes")["current"])

    def driver_used(self) -> int:
        """Memory in use on the entire device, by all processes, as `nvidia-smi` shows it."""
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def standing(self) -> Standing:
        """Current bytes as counted by the allocator and by the driver."""
        return Standing(
            allocated=self.allocated(), reserved=self.reserved(), driver=self.driver_used()
        )

    def library_bytes(self) -> int:
        """Free the cuBLAS workspaces and return their size; cuBLAS allocates them again on use."""
        torch.cuda.synchronize(self._device)
        before = self.allocated()
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is None:
            return 0
        clear()
        return before - self.allocated()

    def _all(self, name: str) -> Any:
        # Called around every operator of a recorded step; `memory_stats` flattens and sorts about
        # a hundred values per call.
        return torch.cuda.memory_stats_as_nested_dict(self._device)[name]["all"]


class History:
    """State of a recording; `overflowed` is true when entries were dropped."""

    overflowed = False


@contextlib.contextmanager
def history() -> Iterator[None]:
    """Record every allocation, with its Python stack, and every free; discard them at the end.

    The stack of a free would double the cost and no reader of a snapshot uses it. The backward pass
    runs on the calling thread: the autograd engine's threads have no Python frames, and discovering
    that takes longer than recording a stack.
    """
    torch.cuda.memory._record_memory_history(
        context="alloc", stacks="python", max_entries=HISTORY_ENTRIES
    )
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@contextlib.contextmanager
def recorded_history(path: Path) -> Iterator[History]:
    """Record the allocations inside with Python stacks and write a snapshot for memory_viz."""
    recording = History()
    with history():
        yield recording
        snapshot = torch.cuda.memory._snapshot()
        traces = snapshot["device_traces"]
        recording.overflowed = any(len(trace) >= HISTORY_ENTRIES for trace in traces)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            pickle.dump(snapshot, file)
