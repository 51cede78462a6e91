"""Interface between an optimizer-in-backward and the operations of that backward pass.

The optimizer provides a side stream for work that nothing else in the backward pass waits for, and
may consume the gradient of a weight in the matmul dtype, without autograd. Without such an
optimizer the work runs on the current stream and gradients go to autograd.

    with offered(optimizer):
        loss.backward()  # its operations call run_overlapped(…) and gradient_consumer(…)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

MAX_PENDING_BYTES = 1 << 30
"""Bytes that pending work on the side stream may read before the main stream waits for it."""


class SideStream:
    """A stream whose work overlaps with the current stream and keeps the tensors it uses alive.

    Memory that the side stream still reads or writes must not be freed for reuse by the main
    stream, also where nothing uses the result. The main stream waits for the oldest work before its
    tensors are released, so the allocator does not need `record_stream`, also in a capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pending: deque[tuple[Callable[[], None], Tensor, torch.cuda.Event]] = deque()
        self._bytes = 0

    def run(self, work: Callable[[], None], reads: Tensor | None) -> None:
        """Run work after what is on the current stream; keep `reads` and what else the work refers
        to alive until it is done."""
        main = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            work()
            done = self._stream.record_event()
        if reads is not None:
            self._pending.append((work, reads, done))
            self._bytes += reads.nbytes
            while self._bytes > MAX_PENDING_BYTES and len(self._pending) > 1:
                self._release_oldest(main)

    def join(self) -> None:
        """Make the current stream wait for all work."""
        main = torch.cuda.current_stream(self._stream.device)
        main.wait_stream(self._stream)
        self._pending.clear()
        self._bytes = 0

    def abandon(self) -> None:
        """Forget all work: it was part of a capture that failed."""
        self._pending.clear()
        self._bytes = 0

    def _release_oldest(self, main: torch.cuda.Stream) -> None:
        _, reads, done = self._pending.popleft()
        main.wait_event(done)
        self._bytes -= reads.nbytes


class BackwardOptimizer(Protocol):
    """An optimizer that updates parameters during the backward pass."""

    def side_stream(self, device: torch.device) -> SideStream | None: ...

    def takes(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Return whether it consumes the gradient of this weight in that dtype."""

    def take(self, weight: Tensor, gradient: Tensor) -> None:
        """Consume the gradient; the weight may change from here on."""


_active: BackwardOptimizer | None = None


@contextmanager
def offered(optimizer: BackwardOptimizer) -> Iterator[None]:
    """Let backward passes within the context use this optimizer, which must join its side
    stream."""
    global _active
    before, _active = _active, optimizer
    try:
        yield
    finally:
        _active = before


def run_overlapped(device: torch.device, work: Callable[[], None], reads: Tensor) -> None:
    """Run work on the side stream of the active optimizer, else on the current stream."""
    side_stream = None if _active is None else _active.side_stream(device)
    if side_stream is None:
        work()
    else:
        side_stream.run(work, reads)


def gradient_consumer(
    weights: Sequence[Tensor | None], dtype: torch.dtype
) -> BackwardOptimizer | None:
    """Return the optimizer that consumes the gradients of all these weights in that dtype; None if
    they go to autograd."""
    optimizer = _active
    if optimizer is None or not all(w is not None and optimizer.takes(w, dtype) for w in weights):
        return None
    return optimizer
