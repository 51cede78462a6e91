"""What CUDA's allocator and driver say of the memory, and a snapshot with stacks."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from stepscope.records.memory import Standing

HISTORY_ENTRIES = 200_000
"""Allocations and frees that a recording keeps; a step of the largest size has a tenth of that."""


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
        """What was asked for; blocks are larger."""
        return int(self._all("requested_bytes")["current"])

    def reserved(self) -> int:
        return int(self._all("reserved_bytes")["current"])

    def driver_used(self) -> int:
        """Of the whole device, by all processes, as `nvidia-smi` shows it."""
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def standing(self) -> Standing:
        """What allocator and driver hold now."""
        return Standing(
            allocated=self.allocated(), reserved=self.reserved(), driver=self.driver_used()
        )

    def library_bytes(self) -> int:
        """Work space that cuBLAS holds in the allocator: given back here, taken again when used."""
        torch.cuda.synchronize(self._device)
        before = self.allocated()
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is None:
            return 0
        clear()
        return before - self.allocated()

    def _all(self, name: str) -> Any:
        # Read around every operator of a recorded step: `memory_stats` would flatten and sort a
        # hundred values each time.
        return torch.cuda.memory_stats_as_nested_dict(self._device)[name]["all"]


class History:
    """Whether a recording kept everything."""

    overflowed = False


@contextlib.contextmanager
def history(entries: int = HISTORY_ENTRIES) -> Iterator[None]:
    """Every allocation and free inside is kept, the first with its Python stack; forgotten at the
    end. A free's stack would double the cost and says nothing that a snapshot is read for.

    A backward runs on the thread that asks for it: the engine's own threads have no frames, and to
    find that out takes longer than a stack.
    """
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=entries)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@contextlib.contextmanager
def recorded_history(path: Path, entries: int = HISTORY_ENTRIES) -> Iterator[History]:
    """Record what happens inside with Python stacks, and write a snapshot that memory_viz opens."""
    recording = History()
    with history(entries):
        yield recording
        held = torch.cuda.memory._snapshot()
        recording.overflowed = any(len(trace) >= entries for trace in held["device_traces"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            pickle.dump(held, file)
