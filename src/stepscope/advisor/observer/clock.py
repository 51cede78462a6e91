"""Clock of the parts of a step: marks at its events, on the CPU or in the queue of a GPU.

On a GPU times are those of its queue, read once the marks are reached; nothing waits for them. The
time between two steps that the GPU spends without work of the step is exposed loading or host time
there, in proportion to what the CPU did meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from stepscope.advisor.scope.steps import backward_task
from stepscope.analysis.observed.lines import Wait
from stepscope.measure.device import CpuDevice, Device, Timestamp
from stepscope.torch_tools.capturing import is_capturing

MAX_WAITS = 32
"""Waits of a step that are listed; those beyond are part of the last."""
_TIMED_WAITS = 16
"""Waits of a step that are timed in every step on a GPU, where a mark costs microseconds. With more
of them, they are timed in some of the steps."""
_MOST_PENDING = 64


class StepTimes(NamedTuple):
    """One step, in milliseconds."""

    number: int
    """Steps of the program at its end."""
    step_ms: float
    loader_ms: float
    host_ms: float
    communication_ms: float | None
    """None if waits were not timed in this step."""
    waits: tuple[Wait, ...]


class _Step:
    def __init__(self, number: int, start: Timestamp, *, timed: bool) -> None:
        self.number = number
        self.start = start
        self.end = start
        self.gaps: list[tuple[Timestamp, Timestamp, float]] = []
        """Begin, end, and seconds in a loader."""
        self.waits: list[tuple[str, Timestamp, Timestamp]] = []
        self.timed = timed


class StepClock:
    """Call `edge` at the end of each step, and the other methods at events within it."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = CpuDevice() if device is None else device
        self._thread = threading.get_ident()
        self._step: _Step | None = None
        self._pending: deque[_Step] = deque()
        self._gap: Timestamp | None = None
        """Since the end of a step or of a backward; None from the forward on."""
        self._loaded: Timestamp | None = None
        """The end of the last load in this gap."""
        self._loaded_s = 0.0
        self._depth = 0
        self._wait: tuple[str, Timestamp] | None = None
        self._steps = 0
        self._waits_last = 0

    @property
    def on_gpu(self) -> bool:
        return self._device.kind == "cuda"

    def edge(self) -> None:
        """End a step and begin the next."""
        mark = self._mark()
        self._steps += 1
        step, self._step = self._step, None
        self._depth, self._wait = 0, None
        if step is not None and mark is not None:
            self._close_gap(step, self._loaded)
            step.end = mark
            self._pending.append(step)
            if step.timed:
                self._waits_last = len(step.waits)
        self._gap = None
        if mark is None:
            # A captured step has no times of its own.
            return
        often = 1 + self._waits_last // _TIMED_WAITS if self.on_gpu else 1
        self._step = _Step(self._steps + 1, mark, timed=self._steps % often == 0)
        self._open_gap(mark)

    def finished(self) -> Iterator[StepTimes]:
        """Yield the steps whose times are known by now."""
        while self._pending:
            step = self._pending[0]
            if not self._device.reached(step.end):
                if len(self._pending) > _MOST_PENDING:
                    self._pending.popleft()
                return
            self._pending.popleft()
            yield self._times(step)

    def forward_begins(self) -> None:
        if self._gap is not None and self._step is not None:
            self._close_gap(self._step, self._mark())

    def work_begins(self) -> None:
        """A backward or an optimizer begins: if no forward was seen, it began after the load."""
        if self._gap is not None and self._step is not None:
            self._close_gap(self._step, self._loaded)

    def backward_ended(self) -> None:
        """What follows may be the next micro-batch, or the optimizer."""
        if self._step is not None and (mark := self._mark()) is not None:
            self._open_gap(mark)

    @contextmanager
    def loading(self, _: object) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._loaded_s += time.perf_counter() - start
            if self._gap is not None:
                self._loaded = self._mark()

    def wait_begins(self, name: str) -> None:
        """Called before the step waits for a collective. Waits within another one are part of it,
        and those of other threads are not waits of the step."""
        if self._step is None or not self._of_step():
            return
        self._depth += 1
        if self._depth == 1 and self._step.timed:
            mark = self._mark()
            self._wait = None if mark is None else (name, mark)

    def wait_ends(self) -> None:
        if self._depth == 0 or not self._of_step():
            return
        self._depth -= 1
        if self._depth or self._wait is None:
            return
        (name, begin), self._wait = self._wait, None
        end = self._mark()
        if self._step is not None and end is not None:
            self._step.waits.append((name, begin, end))

    def _of_step(self) -> bool:
        # On a GPU the backward runs in a thread of its own.
        return threading.get_ident() == self._thread or backward_task() is not None

    def _mark(self) -> Timestamp | None:
        if self.on_gpu and is_capturing():
            return None
        return self._device.mark()

    def _open_gap(self, mark: Timestamp) -> None:
        self._gap, self._loaded, self._loaded_s = mark, None, 0.0

    def _close_gap(self, step: _Step, end: Timestamp | None) -> None:
        if self._gap is not None and end is not None:
            step.gaps.append((self._gap, end, self._loaded_s))
        self._gap = None

    def _ms(self, start: Timestamp, end: Timestamp) -> float:
        on_device = self._device.device_ms(start, end)
        return 1e3 * (end.host_s - start.host_s) if on_device is None else on_device

    def _times(self, step: _Step) -> StepTimes:
        loader = host = 0.0
        for begin, end, loaded_s in step.gaps:
            took, on_host = self._ms(begin, end), end.host_s - begin.host_s
            share = min(1.0, loaded_s / on_host) if on_host > 0.0 else 0.0
            loader += share * took
            host += (1.0 - share) * took
        total = self._ms(step.start, step.end)
        if not step.timed:
            return StepTimes(step.number, total, loader, host, None, ())
        waits: list[Wait] = []
        before, waited = step.start, 0.0
        for name, begin, end in step.waits:
            own, ms = self._ms(before, begin), self._ms(begin, end)
            before, waited = end, waited + ms
            if len(waits) < MAX_WAITS:
                waits.append(Wait(name, own, ms))
            else:
                last = waits[-1]
                waits[-1] = Wait("further collectives", last.own_ms + own, last.ms + ms)
        return StepTimes(step.number, total, loader, host, waited, tuple(waits))
