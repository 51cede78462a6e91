"""Bytes of the gradients that an update overlapped with the backward still reads."""

from __future__ import annotations

from collections import deque

from stepscope.analysis.predict.memory import Buffer

MOST_WAITING = 1 << 30
"""Bytes that work beside may still have to read before the first stream waits for it."""


class DeferredFrees:
    """Keeps what a second stream reads, the oldest until too much waits."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Buffer, int]] = deque()
        self._bytes = 0

    def read(self, held: Buffer, size: int) -> None:
        """`size`: bytes of what is read, which may be a part of its buffer."""
        self._waiting.append((held, size))
        self._bytes += size
        while self._bytes > MOST_WAITING and len(self._waiting) > 1:
            self._bytes -= self._waiting.popleft()[1]

    def join(self) -> None:
        self._waiting.clear()
        self._bytes = 0
