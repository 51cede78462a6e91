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
from torch.autograd.profiler import record_function

from stepscope.errors import one_line
from stepscope.measure.allocator import CudaAllocator, recorded_history
from stepscope.measure.capture import STEP_MARK, Tracer
from stepscope.measure.device import CpuDevice, CudaDevice, Device, Mark
from stepscope.measure.modules import ModuleRanges, any_compiled, hooked_roots
from stepscope.records.schema import Reading
from stepscope.scope.issue import OPTIMIZER, OUTSIDE, IssueClock
from stepscope.scope.loading import batches_taken
from stepscope.scope.memory import WatchedLedger
from stepscope.scope.own_profiler import OtherProfilers
from stepscope.scope.stages import Effort, Stage

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

    def optimizing(self, on: bool) -> None:
        """An optimizer begins or ends its step. Hooks of torch's own tell, as long as we live: one
        that is added or removed while they are called breaks the optimizer."""
        if self.done:
            return
        self._guarded(lambda: self.issue.turn(OPTIMIZER if on else OUTSIDE))
        ledger = self.ledger
        if ledger is not None:
            self._guarded(lambda: ledger.optimizing(on))

    def watch(self) -> None:
        """From here on it is seen whether the program uses a profiler of its own."""
        self._throughout.enter_context(self._others.watched())

    def use(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """The models and optimizers of the step; the device is where the parameters are."""
        self.models, self.optimizers = models, optimizers
        first = next((p for o in optimizers for g in o.param_groups for p in g["params"]), None)
        if first is not None and first.device.type == "cuda":
            current = torch.cuda.current_device()
            self.device = CudaDevice(first.device.index or 0)
            torch.cuda.set_device(current)
            self.effort = msgspec.structs.replace(self.effort, issued=ISSUED_STEPS)

    def _begin(self) -> None:
        stage = self.effort.stage(self.steps)
        if stage is Stage.ISSUED:
            self._start_issuing()
        elif stage is Stage.COUNTED:
            self._start_counting()
        elif stage in (Stage.LEAD_IN, Stage.TRACED) and self._tracer is None:
            self._start_tracing()
        if stage is Stage.TIMED and not self.readings:
            self.readings.append(self.device.read())
            self._energy_begun = self.device.energy_j()
            self._open.enter_context(batches_taken(self._loading))
            self._watch_evaluations()
        self._loaded_ms, self._evaluated = 0.0, 0
        if stage is Stage.TRACED and self._tracer is not None:
            self._mark_trace()
            if self._ranges is not None:
                self._ranges.evaluations = 0
        self._begun = self.device.mark()

    def _end(self) -> None:
        stage = self.effort.stage(self.steps)
        assert self._begun is not None
        end = self.device.mark()
        if stage is Stage.WARMUP:
            self.warmup_s.append(end.host_s - self._begun.host_s)
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
            if self._evaluated > self.usual_evaluations and self._recounts < MOST_RECOUNTS:
                # The next one, unless the program ends: then this has to do.
                self._recounts += 1
                return
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

        hooks = hooked_roots(self.models, enter, lambda *_: None)
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
        hooks = self.issue.hooked(self.models)
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
        ledger = WatchedLedger(self.device.torch_device, allocator)
        self._open.enter_context(ledger.step(self.models, self.optimizers))
        self.ledger = ledger

    def _judge_count(self) -> None:
        if self.ledger is None:
            return
        self.notes.pop("memory_missing", None)
        if self.ledger.failure:
            self.notes["memory_missing"] = f"the count broke off ({self.ledger.failure})"
            self.ledger = None
        elif self.ledger.saved_unseen:
            self.notes["memory_missing"] = (
                "the program uses torch.func.grad or the like, under which nobody sees what is"
                " saved for backward"
            )

    def _start_tracing(self) -> None:
        if self._others.busy:
            # Perhaps it is done by the next step.
            self.notes["trace_missing"] = (
                "the program runs a profiler of its own: read its trace with `stepscope trace`"
            )
            return
        self.notes.pop("trace_missing", None)
        self._ranges = ModuleRanges(self.models)
        self._open.enter_context(self._ranges.entered())
        with self._others.ours():
            self._tracer = Tracer(self.device.kind)
            self._tracer.start()

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
