"""Follows a program from step to step and records some of them; then it does nothing any more.

Whatever goes wrong in here is written down and never reaches the program that is watched.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from stepscope.advisor.scope.closures import with_closure
from stepscope.advisor.scope.counting import StepCount
from stepscope.advisor.scope.energy import StepEnergy
from stepscope.advisor.scope.issue import BACKWARD, FORWARD, OPTIMIZER, OUTSIDE, IssueClock
from stepscope.advisor.scope.loading import batches_taken
from stepscope.advisor.scope.stages import Effort, Stage
from stepscope.advisor.scope.steps import backward_task
from stepscope.advisor.scope.tracing import StepTrace
from stepscope.errors import one_line
from stepscope.measure.device import CpuDevice, CudaDevice, Device, Timestamp
from stepscope.measure.modules import OutermostCalls, hooked_roots
from stepscope.records.schema import Reading

ISSUED_STEPS = 5
MOST_RECOUNTS = 8
"""Of the step whose memory is counted, where it also validates."""
MOST_RAISED = 3
"""Steps that raised while they were counted, or traced: that may be our doing."""
_BROKEN_OFF = {"recording_failed", "trace_missing"}
"""Notes that say why a recording ended before the program."""


class Recorder:
    """`begin` and `end` around each step, or `edge` where one step ends as the next begins."""

    def __init__(self, effort: Effort, folder: Path, name: str = "recording") -> None:
        self.effort = effort
        self.steps = 0
        self.models: Sequence[torch.nn.Module] = ()
        self.called: Sequence[torch.nn.Module] = ()
        """The models, or the parts of them that the program calls instead of the whole."""
        self.parameters: Sequence[torch.Tensor] = ()
        self.optimizers: Sequence[torch.optim.Optimizer] = ()
        self.device: Device = CpuDevice()
        self.times: list[tuple[Timestamp, Timestamp]] = []
        self.warmup_s: list[float] = []
        self.readings: list[Reading] = []
        self.loading_ms: list[float] = []
        """How long each timed step was in a DataLoader. Where the device is made idle, workers
        catch up meanwhile: those steps do not say it."""
        self._loaded_ms = 0.0
        self.evaluations: list[int] = []
        """Calls of the model without gradients in each timed step."""
        self._evaluated = 0
        self._recounts = 0
        self._raised: Counter[Stage] = Counter()
        self.issue = IssueClock(lambda: self._guarded(self._let_device_catch_up))
        self.peak_bytes: int | None = None
        self.notes: dict[str, str] = {}
        """What is missing, and why."""
        self.energy = StepEnergy(self.notes)
        self.done = False
        self.trace = StepTrace(folder / f"{name}.trace.json.gz", self._give_way)
        self.count = StepCount(folder / f"{name}.memory.pickle", self.notes)
        self._throughout = ExitStack()
        """Held from the first step to the end of the recording."""
        self._open = ExitStack()
        """Held while steps are timed, counted or traced."""
        self._begun: Timestamp | None = None
        self._by_edges = False
        self._optimizers_under_way = 0
        self._calls: OutermostCalls | None = None

    def begin(self) -> None:
        if not self.done:
            self._guarded(self._begin)

    def end(self) -> None:
        if not self.done:
            self._guarded(self._end)

    def discard(self) -> None:
        """The step raised: it is as if it had not been made."""
        if not self.done:
            self._guarded(self._discard)

    def edge(self) -> None:
        """The step before ends and another begins."""
        self._by_edges = True
        if self._begun is not None:
            self.end()
        self.begin()

    def finish(self) -> None:
        """The program ends, or its steps do: what there is so far is kept."""
        if not self.done:
            self._guarded(self._conclude)

    def abandon(self) -> None:
        """Ends the recording as if it had never begun."""
        if not self.done:
            self._guarded(self._abandon)

    def optimizer_begins(
        self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A hook ahead of `Optimizer.step`. It stays in place as long as the program runs: one that
        is added or removed while torch calls them breaks the optimizer."""
        if self.done:
            return None
        self.between_operators()
        self._optimizers_under_way += 1
        self._optimizing(True)
        return with_closure(arguments, keywords, self._closure)

    def optimizer_ended(self, *_: Any) -> None:
        """The hook after it. An optimizer may wrap another one: the outermost counts."""
        self._optimizers_under_way -= 1
        if self._optimizers_under_way <= 0 and not self.done:
            self._optimizing(False)

    def between_operators(self) -> None:
        """No operator is under way: a count of too many of them may end here."""
        if not self.done:
            self._guarded(self.count.leave_early)

    @contextmanager
    def _closure(self) -> Iterator[None]:
        """The forward and backward that an optimizer has done within its step are none of it."""
        if self.done:
            yield
            return
        self.between_operators()
        self._optimizing(False)
        # Within, calls of models have ranges that say `forward`; without models, none would.
        try:
            with self.trace.phase(OUTSIDE if self.called else FORWARD):
                yield
        finally:
            self._optimizing(True)

    def _optimizing(self, on: bool) -> None:
        if self.done:
            return
        after = OUTSIDE if backward_task() is None else BACKWARD
        self._guarded(lambda: self.issue.turn(OPTIMIZER if on else after))
        ledger = self.count.ledger
        if ledger is not None:
            self._guarded(lambda: ledger.optimizing(on))

    def watch(self) -> None:
        """From here on it is seen whether the program uses a profiler of its own."""
        self._throughout.enter_context(self.trace.watching_others())

    def use(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[torch.Tensor] = (),
    ) -> None:
        """The models and optimizers of the step, and the parameters, where no optimizer has them;
        the device is where these are."""
        self.models, self.optimizers = models, optimizers
        self.called = models
        held = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        self.parameters = list({id(p): p for p in (*held, *parameters)}.values())
        first = next(iter(self.parameters), None)
        if first is not None and first.device.type == "cuda":
            current = torch.cuda.current_device()
            self.device = CudaDevice(first.device.index or 0)
            torch.cuda.set_device(current)
            self.effort = msgspec.structs.replace(self.effort, issued=ISSUED_STEPS)

    def _begin(self) -> None:
        stage = self.effort.stage(self.steps)
        self._optimizers_under_way = 0
        if stage is Stage.WARMUP and self.steps == self.effort.warmup - 1:
            self._calls = OutermostCalls(self.models)
            self._open.enter_context(self._calls.seen())
        if stage is Stage.ISSUED:
            self._start_issuing()
        elif stage is Stage.COUNTED:
            self._watch_evaluations()
            self.count.begin(self.device, self.models, self.optimizers, self._own_s())
        elif stage in (Stage.LEAD_IN, Stage.TRACED):
            self._limit_trace()
            if self.done:
                return
            if not self.trace.running:
                self._prepare_trace(stage)
        if stage is Stage.TIMED and not self.readings:
            self.readings.append(self.device.read())
            self.energy.begin(self.device)
            self._open.enter_context(batches_taken(self._loading))
            self._watch_evaluations()
        self._loaded_ms, self._evaluated = 0.0, 0
        if stage is Stage.TRACED and self.trace.running:
            self.trace.begin(by_edges=self._by_edges)
        self._begun = self.device.mark()

    def _end(self) -> None:
        stage = self.effort.stage(self.steps)
        assert self._begun is not None
        end = self.device.mark()
        if stage is Stage.WARMUP:
            self.warmup_s.append(end.host_s - self._begun.host_s)
            if self._calls is not None:
                self._open.close()
                self.called = self._calls.of(self.models)
        elif stage is Stage.TIMED:
            self.times.append((self._begun, end))
            self.loading_ms.append(self._loaded_ms)
            self.evaluations.append(self._evaluated)
            if len(self.times) == self.effort.timed:
                self._open.close()
                self.readings.append(self.device.read())
                self.peak_bytes = self._peak()
                took = self.times[-1][1].host_s - self.times[0][0].host_s
                self.energy.end(self.device, took, len(self.times))
        elif stage is Stage.ISSUED:
            self.issue.end()
            self._open.close()
        elif stage is Stage.COUNTED:
            self.count.end()
            self._open.close()
            more = self._evaluated > self.usual_evaluations and not self.count.too_many
            if more and self._recounts < MOST_RECOUNTS:
                # The next one, unless the program ends: then this has to do.
                self._recounts += 1
                return
        elif stage is Stage.LEAD_IN:
            self.count.end()
        elif stage is Stage.TRACED and self.trace.running:
            self.trace.end()
        self.steps += 1
        if self.effort.stage(self.steps) is Stage.DONE:
            if self._by_edges and self.trace.running:
                self.trace.mark_edge()
            self.finish()

    def _discard(self) -> None:
        stage = self.effort.stage(self.steps)
        if stage is Stage.TIMED:
            self.energy.drop()
        elif stage is Stage.WARMUP:
            self._open.close()
        elif stage is Stage.ISSUED:
            self.issue.drop()
            self._open.close()
        elif stage is Stage.COUNTED:
            self.count.drop()
            self._open.close()
            if self._raised_often(stage):
                self.notes["memory_missing"] = "steps raised while their tensors were counted"
                self.steps += 1
        elif stage in (Stage.LEAD_IN, Stage.TRACED) and self.trace.running:
            # Its mark cannot be taken out of the trace.
            self.count.drop()
            self.trace.drop()
            self.steps = self.effort.steps - self.effort.traced - 1
            if self._raised_often(Stage.TRACED):
                self.notes["trace_missing"] = "steps raised while they were traced"
                self._close()

    def _raised_often(self, stage: Stage) -> bool:
        self._raised[stage] += 1
        return self._raised[stage] >= MOST_RAISED

    @property
    def cut_short(self) -> str:
        """How far it came, where the program ended before all of it was recorded."""
        if self.steps >= self.effort.steps or self.notes.keys() & _BROKEN_OFF:
            return ""
        # The first step ends at the first edge.
        made, needed = (steps + self._by_edges for steps in (self.steps, self.effort.steps))
        return f"the program ended after {made} of the {needed} steps that it takes"

    @property
    def usual_evaluations(self) -> int:
        return min(self.evaluations, default=0)

    def _watch_evaluations(self) -> None:
        def enter(*_: Any) -> None:
            self._evaluated += not torch.is_grad_enabled()
            self.between_operators()

        hooks = hooked_roots(self.called, enter, lambda *_: None)
        if hooks is not None:
            self._open.enter_context(hooks)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._loaded_ms += 1e3 * (time.perf_counter() - begun)

    def _start_issuing(self) -> None:
        hooks = self.issue.hooked(self.called)
        if hooks is not None:
            self._open.enter_context(hooks)
            self.issue.begin()

    def _let_device_catch_up(self) -> None:
        # To wait within a capture would break it.
        capturing = self.device.kind == "cuda" and torch.cuda.is_current_stream_capturing()
        if not capturing:
            self.device.synchronize()

    def _own_s(self) -> float:
        """How long the program takes by itself for the steps of this recording, at least."""
        timed = [end.host_s - start.host_s for start, end in self.times]
        others = self.effort.steps - self.effort.warmup
        return sum(self.warmup_s) + others * sum(timed) / len(timed)

    def _limit_trace(self) -> None:
        """As many steps as may be traced; none of one that runs too many operators."""
        if self.count.operators is None or self.trace.steps:
            return
        fit = self.count.steps_that_fit
        if not fit:
            self.trace.drop()
            self.notes["trace_missing"] = self.count.why_not("to trace it")
            self._close()
        elif fit < self.effort.traced:
            self.notes["traced_fewer"] = (
                f"{fit} and not {self.effort.traced}, because a step runs"
                f" {self.count.operators:,} operators"
            )
            self.effort = msgspec.structs.replace(self.effort, traced=fit)

    def _prepare_trace(self, stage: Stage) -> None:
        if self.trace.profiler_is_taken:
            # Perhaps it is done by the next step.
            self.notes["trace_missing"] = (
                "the program runs a profiler of its own: read its trace with `stepscope trace`"
            )
            return
        self.notes.pop("trace_missing", None)
        if stage is Stage.LEAD_IN:
            self.count.begin_bare(self.models, self._own_s())
        self.trace.prepare(self.device, self.models, self.called)

    def _abandon(self) -> None:
        self.trace.drop()
        self._close()

    def _give_way(self) -> None:
        """Somebody else needs the profiler: what was traced so far is of no use."""
        if not self.trace.running:
            return
        self.trace.drop()
        self.notes["trace_missing"] = "the program started a profiler of its own meanwhile"
        self._close()

    def _close(self) -> None:
        self.count.drop()
        self._open.close()
        self._throughout.close()
        self.done = True

    def _peak(self) -> int | None:
        return self.device.peak_bytes() if self.device.kind == "cuda" else None

    def _conclude(self) -> None:
        if self.trace.running:
            self.device.synchronize()
            self.trace.write()
        self._close()

    def _guarded(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            self.notes["recording_failed"] = one_line(error)
            for leave in (self.count.drop, self.trace.drop, self._close):
                with suppress(Exception):
                    leave()
            self.done = True
