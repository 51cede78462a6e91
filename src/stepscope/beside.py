"""Work of a backward that nothing else in it waits for, on a stream of its own.

Whoever uses what such work makes offers the stream: an optimizer that updates within the backward
does. Until then the work is done where it stands.

    with offered(find):  # a Beside for each device
        loss.backward()  # in it: run_beside(device, work, what it reads)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOST_WAITING = 1 << 30
"""Bytes that work beside may still have to read before the first stream waits for it."""


class Beside:
    """Work beside the current stream, in its order, on tensors that it keeps alive.

    Memory that another stream still reads must not be given back to the first one. Here the first
    waits for the oldest work before what it reads is let go of, so the allocator has to know
    nothing of the second stream, in a capture as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._waiting: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._bytes = 0

    def run(self, work: Callable[[], None], reads: Tensor | None) -> None:
        first = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(first)
        with torch.cuda.stream(self._stream):
            work()
            done = self._stream.record_event()
        if reads is not None:
            self._waiting.append((reads, done))
            self._bytes += reads.nbytes
            while self._bytes > MOST_WAITING and len(self._waiting) > 1:
                self._let_go(first)

    def join(self) -> None:
        """The current stream waits for all of it."""
        first = torch.cuda.current_stream(self._stream.device)
        first.wait_stream(self._stream)
        self._waiting.clear()
        self._bytes = 0

    def _let_go(self, first: torch.cuda.Stream) -> None:
        reads, done = self._waiting.popleft()
        first.wait_event(done)
        self._bytes -= reads.nbytes


Find = Callable[[torch.device], Beside | None]
_find: Find | None = None


@contextmanager
def offered(find: Find) -> Iterator[None]:
    """Within this, in backwards too, work may go beside. Who offers it joins it."""
    global _find
    before, _find = _find, find
    try:
        yield
    finally:
        _find = before


def run_beside(device: torch.device, work: Callable[[], None], reads: Tensor) -> None:
    """Beside the current stream where that is offered, else here and now."""
    beside = None if _find is None else _find(device)
    if beside is None:
        work()
    else:
        beside.run(work, reads)
