"""`stepscope.Observer`: all steps of a program, on every rank, for as long as it runs."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from msgspec.structs import replace

from stepscope.advisor.observer.clock import StepClock, StepTimes
from stepscope.advisor.observer.prometheus import prometheus_text
from stepscope.advisor.observer.traced import STEPS, Request, Requests, TracedSteps, read_request
from stepscope.advisor.observer.waits import CollectiveWaits
from stepscope.advisor.observer.writer import Writer
from stepscope.advisor.scope.following import StepFollower
from stepscope.advisor.scope.loading import batches_taken
from stepscope.analysis.observed.deviation import MemoryGrowth, StepDeviation
from stepscope.analysis.observed.lines import (
    PARTS,
    Alarm,
    Line,
    Start,
    Steps,
    Tail,
    Wait,
    rank_file,
)
from stepscope.analysis.observed.stragglers import Stragglers
from stepscope.errors import UsageError, one_line
from stepscope.files import replace_file
from stepscope.measure.device import CpuDevice, CudaDevice, Device
from stepscope.measure.modules import before_calls, trained_models
from stepscope.views.trace.observed import alarm_text

DEFAULT_FOLDER = Path(os.environ.get("STEPSCOPE_OUT", "stepscope-out")) / "observer"
_PROMETHEUS_EVERY_S = 1.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_log = logging.getLogger("stepscope.observer")


class Observer(StepFollower):
    """Observe every training step of this process, and of the other ranks of its job.

        observer = stepscope.Observer()    # on every rank, before the training loop
        ...                                # the loop stays as it is

    Each rank appends a line of JSON to its file in `folder` every `every` steps: the mean step
    time, split into compute, exposed communication, loader and host, and the memory. A thread
    writes it. Deviations are reported once: a rank for which the others wait, with the part of the
    step and the collective; a step that drifts or has become slower; memory that grows. They are
    lines of the files, entries of `alarms`, warnings of the logger `stepscope.observer`, and calls
    of `on_alarm`, in the thread. With `trace`, three steps are traced after a deviation, at most
    three times in a job.

    The first rank finds stragglers in the files of the others, so `folder` has to be one that all
    ranks share; otherwise collect the files for `stepscope trace FOLDER`. `prometheus` is a folder
    for the textfile collector of Prometheus' node exporter.

    A step ends with the optimizer's step. Where no optimizer of torch steps, call `next_step()`
    after each step. Errors are logged once and never raised in the loop.
    """

    _running: ClassVar[Observer | None] = None
    """The observer of this process: that of a script ends that of `stepscope observe`."""

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        every: int = 10,
        trace: bool = True,
        prometheus: str | Path | None = None,
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        super().__init__()
        if every < 2:
            raise UsageError(f"every is {every}", "a line needs at least 2 steps")
        self.folder = DEFAULT_FOLDER if folder is None else Path(folder)
        self.alarms: list[Alarm] = []
        """Deviations reported by this rank; on the first one, also those between ranks."""
        self.latest: Steps | None = None
        """The latest line of this rank."""
        self._every, self._trace = every, trace
        self._prometheus = None if prometheus is None else Path(prometheus)
        self._on_alarm = on_alarm
        self._open = ExitStack()
        self._manual = self._closed = False
        self._steps = 0
        self._times: list[StepTimes] = []
        self._rank, self._ranks = 0, 1
        self._device: Device = CpuDevice()
        self._clock = StepClock()
        self._waits: CollectiveWaits | None = None
        self._models: Sequence[torch.nn.Module] = ()
        self._writer: Writer | None = None
        self._traced: TracedSteps | None = None
        self._request: Request | None = None
        self._requests: Requests | None = None
        self._tails: dict[int, Tail] = {}
        self._stragglers = Stragglers(1)
        self._deviation, self._growth = StepDeviation(), MemoryGrowth()
        self._exported = 0.0
        self._taken: Steps | None = None
        if Observer._running is not None:
            Observer._running.close()
        Observer._running = self
        self.follow()
        atexit.register(self.close)

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next_step(self) -> None:
        """End a step, in a loop whose steps are not found. From the first call on, only these calls
        end steps."""
        self._manual = True
        self._guarded(self._end_step)

    def take_metrics(self) -> dict[str, float]:
        """Return the numbers of the latest line for a logger; empty if they were taken before."""
        line = self.latest
        if line is None or line is self._taken:
            return {}
        self._taken = line
        values = {f"{name}_ms": line.part_ms(name) for name in ("step", *PARTS)}
        sizes = {"allocated": line.allocated_bytes, "resident": line.resident_bytes}
        values |= {f"{name}_bytes": float(n) for name, n in sizes.items() if n is not None}
        return {f"stepscope/{name}": value for name, value in values.items()} | {
            "stepscope/alarms": float(len(self.alarms))
        }

    def close(self) -> None:
        """Write what is left, and stop observing. Called at the exit of the program, too."""
        if self._closed or not self._is_own:
            return
        self._closed = True
        Observer._running = None
        atexit.unregister(self.close)
        with suppress(Exception):
            self._stop_watching()
            self._device.synchronize()
            self._collect()
            self._emit()
        if self._writer is not None:
            self._writer.close()

    # Events of the program.

    def on_optimizer(self, optimizer: Any) -> None:  # noqa: ARG002
        self._clock.work_begins()

    def on_backward(self, roots: Any) -> None:
        self._clock.work_begins()
        if self._waits is not None:
            self._waits.backward_begins(roots)

    def on_backward_ended(self) -> None:
        if self._waits is not None:
            self._waits.backward_ended()
        self._clock.backward_ended()

    def end_step(self) -> None:
        if not self._manual:
            self._guarded(self._end_step)

    def _guarded(self, action: Callable[[], None]) -> None:
        if self._closed:
            return
        try:
            action()
        except Exception as error:
            self._failed(error)
            self.close()

    def _failed(self, error: Exception) -> None:
        _log.warning("stepscope: the observer ended, training continues: %s", one_line(error))

    # A step.

    def _end_step(self) -> None:
        if self._writer is None:
            self._begin()
        self._steps += 1
        self._clock.edge()
        self._collect()
        if self._request is not None and self._traced is not None:
            self._trace_edge(self._request, self._traced)

    def _begin(self) -> None:
        """Start with the first step: ranks, device and models are known then."""
        if dist.is_available() and dist.is_initialized():
            self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        else:
            self._rank = int(os.environ.get("RANK", "0"))
            self._ranks = int(os.environ.get("WORLD_SIZE", "1"))
        parameters = self._finder.parameters
        if parameters and parameters[0].device.type == "cuda":
            current = torch.cuda.current_device()
            self._device = CudaDevice(parameters[0].device.index or 0)
            torch.cuda.set_device(current)
        self._clock = StepClock(self._device)
        self._models = trained_models(parameters)
        self._waits = CollectiveWaits(self._clock)
        self._waits.attach(self._models)
        self._open.callback(self._waits.remove)
        self._open.enter_context(batches_taken(self._clock.loading))
        for handle in before_calls(self._models, self._forward_begins):
            self._open.callback(handle.remove)
        self._deviation, self._growth = StepDeviation(self._rank), MemoryGrowth(self._rank)
        if not self._rank:
            self._stragglers = Stragglers(self._ranks)
            others = range(1, self._ranks)
            self._tails = {rank: Tail(rank_file(self.folder, rank)) for rank in others}
            if self._trace:
                self._requests = Requests(self.folder, self._ranks)
        start = Start(
            at=time.time(),
            rank=self._rank,
            ranks=self._ranks,
            every=self._every,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=self._device.name,
            program=Path(getattr(sys.modules["__main__"], "__file__", None) or "").name,
        )
        writer = Writer(self.folder, start, self._written, self._idle, self._failed)
        writer.start()
        self._writer = writer
        if self._trace:
            self._traced = TracedSteps(writer.put)
            self._open.enter_context(self._traced.watching_others())

    def _forward_begins(self, *_: Any) -> None:
        if torch.is_grad_enabled() and self._is_own:
            self._clock.forward_begins()

    def _collect(self) -> None:
        for times in self._clock.finished():
            self._times.append(times)
            if times.number % self._every == 0:
                self._emit()

    def _emit(self) -> None:
        times, self._times = self._times, []
        if not times or self._writer is None:
            return
        line = summarized(times)
        line = replace(line, at=time.time(), traced=self._disturbed(times), **_memory(self._device))
        self.latest = line
        self._writer.put(line)

    def _disturbed(self, times: Sequence[StepTimes]) -> bool:
        """True for the traced steps, and for those during which the traces are written."""
        request = self._request
        if request is None:
            return False
        first, last = times[0].number, times[-1].number
        return last >= request.step and first <= request.step + STEPS + self._every

    def _trace_edge(self, request: Request, traced: TracedSteps) -> None:
        if self._rank in request.ranks:
            path = request.folder(self.folder) / f"rank-{self._rank}.trace.json.gz"
            traced.edge(self._steps, request.step, path, self._device, self._models)

    def _stop_watching(self) -> None:
        self.unfollow()
        if self._traced is not None:
            self._traced.drop()
        self._open.close()

    # In the thread of the writer.

    def _written(self, line: Line) -> Iterable[Line]:
        """Find deviations of this rank in a line that was written."""
        if not isinstance(line, Steps):
            return
        for detector in (self._deviation, self._growth):
            if (alarm := detector.add(line)) is not None:
                yield self._alarmed(alarm, line)
        yield from self._compared(0, line)
        if self._prometheus is not None and time.monotonic() - self._exported > _PROMETHEUS_EVERY_S:
            self._exported = time.monotonic()
            self._prometheus.mkdir(parents=True, exist_ok=True)
            text = prometheus_text(self._rank, line, [one.code for one in self.alarms])
            replace_file(self._prometheus / f"stepscope-rank-{self._rank}.prom", [text.encode()])

    def _compared(self, rank: int, line: Steps) -> Iterator[Line]:
        if not self._rank and self._ranks > 1:
            for alarm in self._stragglers.add(rank, line):
                yield self._alarmed(alarm, line)

    def _idle(self) -> Iterator[Line]:
        """On the first rank, compare the ranks and fetch verdicts; on all, look for a request."""
        if self._trace:
            self._request = read_request(self.folder)
        if self.latest is None:
            # The files of an earlier job are moved aside in the first steps.
            return
        for rank, tail in self._tails.items():
            for line in tail.read():
                if isinstance(line, Steps):
                    yield from self._compared(rank, line)
                elif isinstance(line, Alarm):
                    self._ask_for_traces(line, self.latest)
        if self._requests is not None:
            result = self._requests.result(ending=self._closed)
            if result is not None:
                _log.warning("stepscope: %s (%s)", result.verdict, self.folder / result.folder)
                yield result

    def _alarmed(self, alarm: Alarm, line: Steps) -> Alarm:
        alarm = replace(alarm, at=time.time(), text=alarm_text(alarm))
        self.alarms.append(alarm)
        # A synchronous step drifts on all ranks.
        if not self._rank or alarm.code == "memory-growth":
            _log.warning("stepscope: step %s: %s", alarm.step, alarm.text)
        if self._on_alarm is not None:
            self._on_alarm(alarm)
        self._ask_for_traces(alarm, line)
        return alarm

    def _ask_for_traces(self, alarm: Alarm, line: Steps) -> None:
        if self._requests is not None and not self._closed:
            self._requests.ask(self._steps, alarm.rank, line.step_ms, self._every)


def summarized(times: Sequence[StepTimes]) -> Steps:
    """Return the line of consecutive steps, without what is not a time of them."""
    step_ms = statistics.fmean(one.step_ms for one in times)
    loader_ms = statistics.fmean(one.loader_ms for one in times)
    host_ms = statistics.fmean(one.host_ms for one in times)
    timed = [one for one in times if one.communication_ms is not None]
    waited = [one.communication_ms or 0.0 for one in timed]
    communication_ms = statistics.fmean(waited) if waited else 0.0
    own = timed or times
    names = [wait.collective for wait in timed[-1].waits] if timed else []
    alike = [one.waits for one in timed if [wait.collective for wait in one.waits] == names]
    waits = tuple(
        Wait(
            name,
            round(statistics.fmean(of[index].own_ms for of in alike), 4),
            round(statistics.fmean(of[index].ms for of in alike), 4),
        )
        for index, name in enumerate(names)
    )
    return Steps(
        at=0.0,
        step=times[-1].number,
        steps=len(times),
        step_ms=step_ms,
        slowest_ms=max(one.step_ms for one in times),
        compute_ms=max(0.0, step_ms - loader_ms - host_ms - communication_ms),
        communication_ms=communication_ms,
        loader_ms=loader_ms,
        host_ms=host_ms,
        usual_ms=statistics.median(one.step_ms - (one.communication_ms or 0.0) for one in own),
        waits=waits,
    )


def _memory(device: Device) -> dict[str, int]:
    sizes = {}
    if device.kind == "cuda":
        sizes["allocated_bytes"] = torch.cuda.memory_allocated(device.torch_device)
        sizes["reserved_bytes"] = torch.cuda.memory_reserved(device.torch_device)
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        sizes["resident_bytes"] = pages * _PAGE_BYTES
    return sizes
