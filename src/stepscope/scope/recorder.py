"""Follows a program from step to step and records some of them; then it does nothing any more.

Whatever goes wrong in here is written down and never reaches the program that is watched.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.autograd.profiler import record_function

from stepscope.errors import one_line
from stepscope.measure.allocator import CudaAllocator, recorded_history
from stepscope.measure.capture import STEP_MARK, Tracer
from stepscope.measure.device import CpuDevice, CudaDevice, Device, Mark
from stepscope.measure.modules import (
    ModuleRanges,
    OutermostCalls,
    any_compiled,
    hooked_roots,
)
from stepscope.records.schema import Reading
from stepscope.scope.closures import with_closure
from stepscope.scope.issue import BACKWARD, FORWARD, OPTIMIZER, OUTSIDE, IssueClock
from stepscope.scope.loading import batches_taken
from stepscope.scope.memory import OperatorCount, WatchedLedger
from stepscope.scope.own_profiler import OtherProfilers
from stepscope.scope.stages import MOST_OPERATORS, Effort, Stage, most_operators
from stepscope.scope.steps import backward_task

STEP_EDGE = "StepEdge#"
ISSUED_STEPS = 5
ENERGY_WITHIN_S = 1.0
"""Steps that take less together have no energy: one move of the counter would be a tenth of it."""
MOST_RECOUNTS = 8
"""Of the step whose memory is counted, where it also validates."""
MOST_RAISED = 3
"""Steps that raised while they were counted, or traced: that may be our doing."""
_BROKEN_OFF = {"recording_failed", "trace_missing"}
"""Notes that say why a recording ended before the program."""
ENERGY_MOVES_S = 0.1
"""How seldom a driver moves its counter at most."""


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
        self.times: list[tuple[Mark, Mark]] = []
        self.warmup_s: list[float] = []
        self.readings: list[Reading] = []
        self.loading_ms: list[float] = []
        """How long each timed step was in a DataLoader. Where the device is made idle, workers
        catch up meanwhile: those steps do not say it."""
        self._loaded_ms = 0.0
        self.evaluations: list[int] = []
        """Calls of the model without gradients in each timed step."""
        self.traced_evaluations: list[int] = []
        self._evaluated = 0
        self._recounts = 0
        self._raised: Counter[Stage] = Counter()
        self.issue = IssueClock(lambda: self._guarded(self._let_device_catch_up))
        self.ledger: WatchedLedger | None = None
        self.traced = 0
        self.forwards = 0
        self.peak_bytes: int | None = None
        self.joules: float | None = None
        """Of a timed step."""
        self._energy_begun: float | None = None
        self.notes: dict[str, str] = {}
        """What is missing, and why."""
        self.done = False
        self.trace = folder / f"{name}.trace.json.gz"
        self.snapshot = folder / f"{name}.memory.pickle"
        self._others = OtherProfilers(self._give_way)
        self._throughout = ExitStack()
        """Held from the first step to the end of the recording."""
        self._open = ExitStack()
        """Held while steps are timed, counted or traced."""
        self._tracer: Tracer | None = None
        self._ranges: ModuleRanges | None = None
        self._open_step = ExitStack()
        self._begun: Mark | None = None
        self._by_edges = False
        self._optimizers_under_way = 0
        self._calls: OutermostCalls | None = None
        self._lead_in = ExitStack()
        self._count: OperatorCount | None = None
        self._operators: int | None = None
        """Of the step that was counted, where one was."""
        self._most_operators = MOST_OPERATORS

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
        if self.ledger is not None and not self.done:
            self._guarded(self._end_count_of_too_many)

    @contextmanager
    def _closure(self) -> Iterator[None]:
        """The forward and backward that an optimizer has done within its step are none of it."""
        if self.done:
            yield
            return
        self.between_operators()
        self._optimizing(False)
        # Within, calls of models have ranges that say `forward`; without models, none would.
        phase = record_function(OUTSIDE if self.called else FORWARD)
        try:
            with phase if self._tracer is not None else nullcontext():
                yield
        finally:
            self._optimizing(True)

    def _optimizing(self, on: bool) -> None:
        if self.done:
            return
        after = OUTSIDE if backward_task() is None else BACKWARD
        self._guarded(lambda: self.issue.turn(OPTIMIZER if on else after))
        ledger = self.ledger
        if ledger is not None:
            self._guarded(lambda: ledger.optimizing(on))

    def watch(self) -> None:
        """From here on it is seen whether the program uses a profiler of its own."""
        self._throughout.enter_context(self._others.watched())

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
            self._start_counting()
        elif stage in (Stage.LEAD_IN, Stage.TRACED):
            self._limit_trace()
            if self.done:
                return
            if self._tracer is None:
                self._prepare_trace(stage)
        if stage is Stage.TIMED and not self.readings:
            self.readings.append(self.device.read())
            self._energy_begun = self.device.energy_j()
            self._open.enter_context(batches_taken(self._loading))
            self._watch_evaluations()
        self._loaded_ms, self._evaluated = 0.0, 0
        if stage is Stage.TRACED and self._tracer is not None:
            self._begin_traced(self._tracer)
        self._begun = self.device.mark()

    def _end(self) -> None:
        stage = self.effort.stage(self.steps)
        assert self._begun is not None
        end = self.device.mark()
        if stage is Stage.WARMUP:
            self.warmup_s.append(end.host_s - self._begun.host_s)
            if self._calls is not None:
                self._open.close()
                self.called = self._calls.modules or self.models
        elif stage is Stage.TIMED:
            self.times.append((self._begun, end))
            self.loading_ms.append(self._loaded_ms)
            self.evaluations.append(self._evaluated)
            if len(self.times) == self.effort.timed:
                self._open.close()
                self.readings.append(self.device.read())
                self.peak_bytes = self._peak()
                self._note_energy()
        elif stage is Stage.ISSUED:
            self.issue.end()
            self._open.close()
        elif stage is Stage.COUNTED:
            self._open.close()
            self._judge_count()
            more = self._evaluated > self.usual_evaluations and not self._runs_too_many
            if more and self._recounts < MOST_RECOUNTS:
                # The next one, unless the program ends: then this has to do.
                self._recounts += 1
                return
        elif stage is Stage.LEAD_IN:
            self._lead_in.close()
            if self._count is not None:
                self._operators = self._count.operators
        elif stage is Stage.TRACED and self._tracer is not None:
            self.traced += 1
            if self._ranges is not None:
                self.forwards = self._ranges.forwards
                self.traced_evaluations.append(self._ranges.evaluations)
            if not self._by_edges:
                self._open_step.close()
        self.steps += 1
        if self.effort.stage(self.steps) is Stage.DONE:
            if self._by_edges and self._tracer is not None:
                self._mark_trace()
            self.finish()

    def _discard(self) -> None:
        stage = self.effort.stage(self.steps)
        if stage is Stage.TIMED and self._energy_begun is not None:
            self._energy_begun = None
            self.notes["no_energy"] = "a step raised among the timed ones, and the counter ran on"
        elif stage is Stage.WARMUP:
            self._open.close()
        elif stage is Stage.ISSUED:
            self.issue.drop()
            self._open.close()
        elif stage is Stage.COUNTED:
            self._open.close()
            self.ledger = None
            self.snapshot.unlink(missing_ok=True)
            if self._raised_often(stage):
                self.notes["memory_missing"] = "steps raised while their tensors were counted"
                self.steps += 1
        elif stage in (Stage.LEAD_IN, Stage.TRACED) and self._tracer is not None:
            # Its mark cannot be taken out of the trace.
            self._lead_in.close()
            self._open_step.close()
            self._drop_trace()
            self._open.close()
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

    def _start_counting(self) -> None:
        if any_compiled(self.models):
            self.notes["memory_missing"] = (
                "the model is compiled: what its kernels keep is not seen from outside"
            )
            return
        allocator = None
        if self.device.kind == "cuda":
            allocator = CudaAllocator(self.device.torch_device)
            recording = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)
            if recording():
                self.notes["snapshot_missing"] = "the program records the allocator's history"
            else:
                self._open.enter_context(recorded_history(self.snapshot))
        self._watch_evaluations()
        self._most_operators = most_operators(self._own_s())
        ledger = WatchedLedger(self.device.torch_device, allocator, self._most_operators)
        self._open.enter_context(ledger.step(self.models, self.optimizers))
        self.ledger = ledger

    def _own_s(self) -> float:
        """How long the program takes by itself for the steps of this recording, at least."""
        timed = [end.host_s - start.host_s for start, end in self.times]
        others = self.effort.steps - self.effort.warmup
        return sum(self.warmup_s) + others * sum(timed) / len(timed)

    def _end_count_of_too_many(self) -> None:
        """Its instruments slow down every further operator of the step, even if they do nothing."""
        ledger = self.ledger
        if ledger is not None and ledger.too_many and ledger.can_leave():
            self._open.close()
            self._judge_count()

    def _judge_count(self) -> None:
        if self.ledger is None:
            return
        self.notes.pop("memory_missing", None)
        self._operators = self.ledger.operators
        if self.ledger.too_many:
            self._too_many("memory_missing", "to count their tensors")
            self.snapshot.unlink(missing_ok=True)
            self.ledger = None
        elif self.ledger.failure:
            self.notes["memory_missing"] = f"the count broke off ({self.ledger.failure})"
            self.ledger = None
        elif self.ledger.saved_unseen:
            self.notes["memory_missing"] = (
                "the program uses torch.func.grad or the like, under which nobody sees what is"
                " saved for backward"
            )

    def _too_many(self, note: str, what: str) -> None:
        self.notes[note] = (
            f"a step runs more than {self._most_operators:,} operators, and {what} would take"
            " longer than a quarter of the program's own time (time more steps with --timed, or"
            " mark a shorter step with stepscope.Scope)"
        )

    @property
    def _runs_too_many(self) -> bool:
        return self._operators is not None and self._operators > self._most_operators

    def _limit_trace(self) -> None:
        """As many steps as may be traced; none of one that runs too many operators."""
        if self._operators is None or self.traced:
            return
        if self._runs_too_many:
            if self._tracer is not None:
                self._drop_trace()
            self._too_many("trace_missing", "to trace it")
            self._close()
            return
        fit = max(1, self._most_operators // max(1, self._operators))
        if fit < self.effort.traced:
            self.notes["traced_fewer"] = (
                f"a step runs {self._operators:,} operators, so {fit} of the {self.effort.traced}"
                " steps that were to be traced are"
            )
            self.effort = msgspec.structs.replace(self.effort, traced=fit)

    def _prepare_trace(self, stage: Stage) -> None:
        if self._others.busy:
            # Perhaps it is done by the next step.
            self.notes["trace_missing"] = (
                "the program runs a profiler of its own: read its trace with `stepscope trace`"
            )
            return
        self.notes.pop("trace_missing", None)
        if self._operators is None and not any_compiled(self.models) and stage is Stage.LEAD_IN:
            self._most_operators = most_operators(self._own_s())
            self._count = self._lead_in.enter_context(OperatorCount())
        self._ranges = ModuleRanges(self.models, self.called)
        self._open.enter_context(self._ranges.entered())
        with self._others.ours():
            self._tracer = Tracer(self.device.kind)
            self._tracer.prepare()
            if self.device.kind == "cuda":
                # Kernels of this step may still run when the next begins: they are told from its
                # own by their launches.
                self._tracer.start()

    def _begin_traced(self, tracer: Tracer) -> None:
        if tracer.prepared:
            with self._others.ours():
                tracer.start()
        self._mark_trace()
        if self._ranges is not None:
            self._ranges.evaluations = 0
            if not self.traced:
                self._ranges.forget_calls()

    def _abandon(self) -> None:
        if self._tracer is not None:
            self._drop_trace()
        self._close()
        self.snapshot.unlink(missing_ok=True)

    def _give_way(self) -> None:
        """Somebody else needs the profiler: what was traced so far is of no use."""
        if self._tracer is None:
            return
        self._drop_trace()
        self.notes["trace_missing"] = "the program started a profiler of its own meanwhile"
        self._close()

    def _drop_trace(self) -> None:
        assert self._tracer is not None
        tracer, self._tracer = self._tracer, None
        with self._others.ours():
            tracer.stop()
        self.traced = self.forwards = 0
        self.traced_evaluations.clear()

    def _close(self) -> None:
        self._lead_in.close()
        self._open.close()
        self._throughout.close()
        self.done = True

    def _mark_trace(self) -> None:
        if self._by_edges:
            with record_function(f"{STEP_EDGE}{self.traced}"):
                pass
            return
        self._open_step.enter_context(record_function(f"{STEP_MARK}{self.traced}"))
        self._open_step.enter_context(record_function("outside"))

    def _note_energy(self) -> None:
        """Of the timed steps; the counter moves some tens of times a second, which few or short
        steps do not outlast."""
        begun, now = self._energy_begun, self.device.energy_j()
        if begun is None or now is None:
            self.notes.setdefault("no_energy", self.device.energy_missing)
            return
        took = self.times[-1][1].host_s - self.times[0][0].host_s
        if took < ENERGY_WITHIN_S:
            self.notes["no_energy"] = (
                f"the timed steps take {took:.2g} s, and the counter needs {ENERGY_WITHIN_S:g} s"
                " (give a larger --timed)"
            )
            return
        self.joules = (now - begun) / len(self.times)

    def _peak(self) -> int | None:
        return self.device.peak_bytes() if self.device.kind == "cuda" else None

    def _conclude(self) -> None:
        if self._tracer is not None:
            self.device.synchronize()
            tracer, self._tracer = self._tracer, None
            with self._others.ours():
                tracer.stop()
            if self.traced:
                tracer.write(self.trace)
        self._close()

    def _guarded(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            self.notes["recording_failed"] = one_line(error)
            self._tracer = None
            with suppress(Exception):
                self._close()
            self.done = True
