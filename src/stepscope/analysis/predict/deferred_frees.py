"""Gradients that an optimizer overlapped with the backward pass still reads."""

from __future__ import annotations

from collections import deque

from stepscope.analysis.predict.memory import Buffer

MAX_PENDING_BYTES = 1 << 30
"""Bytes that the side stream may still have to read before the main stream waits for it."""


class DeferredFrees:
    """Keeps buffers alive that a side stream reads; the oldest are released when too many wait."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Buffer, int]] = deque()
        self._bytes = 0

    def read(self, buffer: Buffer, size: int) -> None:
        """`size` is the number of bytes read, which may be part of the buffer."""
        self._waiting.append((buffer, size))
        self._bytes += size
        while self._bytes > MAX_PENDING_BYTES and len(self._waiting) > 1:
            self._bytes -= self._waiting.popleft()[1]

    def join(self) -> None:
        self._waiting.clear()
        self._bytes = 0
