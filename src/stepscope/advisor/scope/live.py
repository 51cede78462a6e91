"""Times of all steps of a program, written to a file for a live view."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from stepscope.advisor.inspect.progress import LiveSteps, write_live
from stepscope.advisor.scope.loading import batches_taken

_SHOWN_STEPS = 60
_WRITE_EVERY_S = 0.25
"""Writing the file takes about 0.1 ms."""


class LiveTimes:
    """Call `step_ended` after each step. Between two writes of the file a step costs about a
    microsecond, and taking a batch from a DataLoader another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps = 0
        self._times: deque[tuple[float, float]] = deque(maxlen=_SHOWN_STEPS)
        """Seconds of a step, and of its waits for a DataLoader."""
        self._loaded_s = 0.0
        self._since: float | None = None
        self._written = 0.0
        self._watching = ExitStack()

    def step_ended(self, stage: str) -> None:
        """Note the end of a step; `stage` says what is done with the next one."""
        now = time.perf_counter()
        if self._since is None:
            # Not earlier: the program may still import parts of torch.
            self._watching.enter_context(batches_taken(self._loading))
        else:
            self._times.append((now - self._since, self._loaded_s))
        self._since, self._loaded_s = now, 0.0
        self._steps += 1
        if now - self._written >= _WRITE_EVERY_S:
            self._written = now
            self._write(stage)

    def close(self) -> None:
        """Write the last steps."""
        self._watching.close()
        self._write("")

    @contextmanager
    def _loading(self, _: object) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._loaded_s += time.perf_counter() - start

    def _write(self, stage: str) -> None:
        total = sum(step for step, _ in self._times)
        loaded = sum(waited for _, waited in self._times)
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        live = LiveSteps(
            steps=self._steps,
            step_ms=tuple(1e3 * step for step, _ in self._times),
            loading=loaded / total if total else 0.0,
            stage=stage,
            memory_bytes=torch.cuda.memory_allocated() if on_gpu else None,
            peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        )
        write_live(self._folder, live)
