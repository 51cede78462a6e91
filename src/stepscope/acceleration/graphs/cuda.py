"""CUDA graphs of a function that may be cut into several, and recovery from a failed capture.

Warm-up and capture use one side stream. A parameter's AccumulateGrad node stays on the stream on
which it was created, and a capture must not wait for another stream.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")
Cut = Callable[[Callable[[], None]], None]
"""End the current graph, run work that is not captured, and begin the next graph."""

_FIRST = -1
"""Stream priority: lower numbers go first; 0 is the default. Work that is forked within a capture
onto a stream of default priority then fills what the capturing stream leaves idle."""

_generations: dict[int, int] = {}


class Replayable(Protocol):
    def replay(self) -> None: ...


class Backend(Protocol):
    """Interface that runs and captures a function; tests use one without a GPU."""

    @property
    def generation(self) -> int:
        """Graphs of an earlier generation draw their random numbers from a replaced generator."""

    def on_side_stream(self) -> Any:
        """Return a context in which work runs on the stream of the captures."""

    def capture(self, run: Callable[[Cut], T]) -> tuple[Replayable, T]:
        """Capture a function, which is not executed. A failure leaves the device usable."""

    def pool_bytes(self) -> int:
        """Return the bytes that the graphs of this backend hold."""


class CudaGraphs:
    """Graphs of one device that share a memory pool: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", device.index or 0)
        self._stream = torch.cuda.Stream(self._device, priority=_FIRST)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._alive: weakref.WeakSet[_Recording] = weakref.WeakSet()

    @property
    def generation(self) -> int:
        return _generations.get(self._device.index, 0)

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                current.wait_stream(self._stream)

    def capture(self, run: Callable[[Cut], T]) -> tuple[Replayable, T]:
        # Code of torch.compile may hold the autograd graph of an earlier step in a reference cycle.
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        state = torch.cuda.get_rng_state(self._device)
        if not self._alive:
            # A pool whose graphs are gone cannot be captured into again.
            self._pool = torch.cuda.graph_pool_handle()
        recording = _Recording(self._pool)
        try:
            with self.on_side_stream(), _own_workspaces():
                recording.begin()
                try:
                    result = run(recording.cut)
                    recording.end()
                except BaseException:
                    recording.abort(self._device, shared=bool(self._alive))
                    raise
        except BaseException:
            recover_generator(self._device, state)
            raise
        self._alive.add(recording)
        return recording, result

    def pool_bytes(self) -> int:
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if tuple(segment["segment_pool_id"]) == tuple(self._pool)
        )


class _Recording:
    """One graph or several that are replayed in order."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._begun, self._open, self._incomplete = False, False, False

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._begun, self._incomplete = False, True
        # Other threads may use the device meanwhile, such as one that pins batches.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graphs.append(graph)
        self._begun = self._open = True

    def end(self) -> None:
        self._open = False
        self._graphs[-1].capture_end()
        self._incomplete = False

    def cut(self, work: Callable[[], None]) -> None:
        self.end()
        work()
        self.begin()

    def abort(self, device: torch.device, *, shared: bool) -> None:
        """End the capture and release its use of the pool, which other graphs use too if `shared`.

        torch completes the graph after an exception that has nothing to do with the device, and
        between two graphs none is open."""
        if self._open:
            with suppress(RuntimeError):
                self.end()
        if self._incomplete:
            # A capture that ends with an error does not release the allocator.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(device.index, self._pool)
        # torch releases the pool with a completed graph; twice would free the memory of others. If
        # the capture did not begin, it is not known whether the use was counted.
        unreleased = not _is_completed(self._graphs[-1]) if self._begun else not shared
        # First: a graph must not release a pool that is not in use.
        self._graphs.clear()
        if self._incomplete and unreleased:
            with suppress(RuntimeError):
                torch._C._cuda_releasePool(device.index, self._pool)

    def replay(self) -> None:
        for graph in self._graphs:
            graph.replay()


def _is_completed(graph: torch.cuda.CUDAGraph) -> bool:
    """Return whether torch releases the memory pool with this graph. It may although the end of the
    capture raised."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Allocate cuBLAS workspaces of a capture in the pool of the graph, and not use them outside:
    other code may free the workspaces of a stream."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def recover_generator(device: torch.device, state: torch.Tensor) -> None:
    """Restore the generator after a failed capture, which may have left it registered with the
    graph: every later random number would then fail."""
    index = device.index or 0
    try:
        torch.empty(1, device=device).uniform_()
    except RuntimeError:
        replacement = torch.Generator(device)
        torch.cuda.default_generators[index].graphsafe_set_state(replacement.graphsafe_get_state())
        _generations[index] = _generations.get(index, 0) + 1
    torch.cuda.set_rng_state(state, device)
