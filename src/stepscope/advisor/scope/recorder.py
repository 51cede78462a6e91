"""Recorder of training steps: times, counts and traces some of them, then turns itself off.

Errors in the recorder are noted and never reach the observed program.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from stepscope.advisor.lines.loader import LoaderLines
from stepscope.advisor.lines.recording import StepLines, script_folder
from stepscope.advisor.scope.closures import with_closure
from stepscope.advisor.scope.counting import StepCount
from stepscope.advisor.scope.issue import BACKWARD, FORWARD, OPTIMIZER, OUTSIDE, IssueClock
from stepscope.advisor.scope.loading import as_one_range, batches_taken
from stepscope.advisor.scope.stages import Effort, Stage
from stepscope.advisor.scope.steps import backward_task
from stepscope.advisor.scope.tokens import tokens_in
from stepscope.advisor.scope.tracing import StepTrace
from stepscope.errors import one_line
from stepscope.measure.device import CpuDevice, CudaDevice, Device, Timestamp
from stepscope.measure.modules import OutermostCalls, hooked_roots
from stepscope.records.plans import Planned
from stepscope.records.schema import Reading
from stepscope.records.stats import MIN_SAMPLES

ISSUED_STEPS = 5
"""Steps in which the host's issue time is measured, on a GPU."""
MAX_RECOUNTS = 8
"""Repetitions of the memory count if the counted step also ran a validation."""
MAX_RAISED = 3
"""Exceptions in counted or traced steps before giving up: the recorder may be the cause."""
_ENDED_EARLY = {"recording_failed", "trace_missing"}
"""Notes with the reason why a recording ended before the program."""


class Recorder:
    """Call `begin` and `end` around each step, or `edge` between consecutive steps."""

    def __init__(self, effort: Effort, folder: Path, name: str = "recording") -> None:
        self.effort = effort
        self.steps = 0
        self.models: Sequence[torch.nn.Module] = ()
        self.called: Sequence[torch.nn.Module] = ()
        """The models, or the submodules that the program calls instead."""
        self.parameters: Sequence[torch.Tensor] = ()
        self.optimizers: Sequence[torch.optim.Optimizer] = ()
        self.device: Device = CpuDevice()
        self.times: list[tuple[Timestamp, Timestamp]] = []
        self.warmup_s: list[float] = []
        self.readings: list[Reading] = []
        self.loading_ms: list[float] = []
        """Time of each timed step in a DataLoader. Steps of other stages do not count: while the
        device is made idle, loader workers catch up."""
        self._loaded_ms = 0.0
        self.loader_workers = 0
        """Worker processes of the DataLoaders that the timed steps took batches from."""
        self._loads_apart = False
        """Whether the operators of the DataLoaders are hidden."""
        self.epoch_starts: list[int] = []
        """DataLoaders whose first batch each timed step took: their workers have just started."""
        self._epoch_starts = 0
        self.evaluations: list[int] = []
        """Calls of the model without gradients, for each timed step."""
        self._evaluated = 0
        self.tokens: list[int] = []
        """Tokens in the model's inputs, for each timed step."""
        self._tokens = 0
        self._recounts = 0
        self._raised: Counter[Stage] = Counter()
        self.issue = IssueClock(lambda: self._guarded(self._let_device_catch_up))
        self.peak_bytes: int | None = None
        self.notes: dict[str, str] = {}
        """Parts that are missing from the recording, with the reasons."""
        self.plans: Planned = ()
        """Plans of the memory of the step, if any."""
        self.done = False
        self.trace = StepTrace(folder / f"{name}.trace.json.gz", self._give_way)
        self.count = StepCount(folder / f"{name}.memory.pickle", self.notes)
        self.lines = StepLines(folder / f"{name}.lines.json", self.notes)
        self.loader_lines = LoaderLines(folder, name, script_folder())
        self._throughout = ExitStack()
        """Contexts entered from the first step to the end of the recording."""
        self._open = ExitStack()
        """Contexts entered while steps are timed, counted or traced."""
        self._step_start: Timestamp | None = None
        self._by_edges = False
        self._optimizers_running = 0
        self._calls: OutermostCalls | None = None

    @property
    def stage(self) -> Stage:
        """What is done with the current step."""
        return self.effort.stage(self.steps)

    def begin(self) -> None:
        if not self.done:
            self._guarded(self._begin)

    def end(self) -> None:
        if not self.done:
            self._guarded(self._end)

    def discard(self) -> None:
        """Ignore the current step, which raised an exception."""
        if not self.done:
            self._guarded(self._discard)

    def edge(self) -> None:
        """End the previous step and begin the next."""
        self._by_edges = True
        if self._step_start is not None:
            self.end()
        self.begin()

    def finish(self) -> None:
        """End the recording and save what it has so far."""
        if not self.done:
            self._guarded(self._conclude)

    def abandon(self) -> None:
        """End the recording and discard it."""
        if not self.done:
            self._guarded(self._abandon)

    def optimizer_begins(
        self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pre-hook of `Optimizer.step`. It stays registered as long as the program runs: adding or
        removing a hook while torch calls them breaks the optimizer."""
        if self.done:
            return None
        self.between_operators()
        self._optimizers_running += 1
        self._optimizing(True)
        return with_closure(arguments, keywords, self._closure)

    def optimizer_ended(self, *_: Any) -> None:
        """Post-hook of `Optimizer.step`. An optimizer may wrap another: the outermost counts."""
        self._optimizers_running -= 1
        if self._optimizers_running <= 0 and not self.done:
            self._optimizing(False)

    def between_operators(self) -> None:
        """Called when no operator is running, where a count of too many operators may end."""
        if not self.done:
            self._guarded(self.count.leave_early)
            if not self.count.active:
                # Its mode was entered before that of the count.
                self._guarded(self.lines.leave_early)

    @contextmanager
    def _closure(self) -> Iterator[None]:
        """Context of a closure: its forward and backward are not part of the optimizer step."""
        if self.done:
            yield
            return
        self.between_operators()
        self._optimizing(False)
        # Calls of models have their own `forward` ranges; without models there would be none.
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
        """Start to detect profilers of the program."""
        self._throughout.enter_context(self.trace.watching_others())

    def use(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[torch.Tensor] = (),
    ) -> None:
        """Set the models and optimizers of the step, and the parameters that no optimizer has. The
        device is that of the parameters."""
        self.models, self.optimizers = models, optimizers
        self.called = models
        optimized = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        self.parameters = list({id(p): p for p in (*optimized, *parameters)}.values())
        first = next(iter(self.parameters), None)
        if first is not None and first.device.type == "cuda":
            current = torch.cuda.current_device()
            self.device = CudaDevice(first.device.index or 0)
            torch.cuda.set_device(current)
            self.effort = msgspec.structs.replace(self.effort, issued=ISSUED_STEPS)

    def _begin(self) -> None:
        stage = self.stage
        self._optimizers_running = 0
        if stage is Stage.WARMUP and not self.steps:
            self._open.enter_context(batches_taken(self._sampled_loading))
        if stage is Stage.WARMUP and self.steps == self.effort.warmup - 1:
            self._calls = OutermostCalls(self.models)
            self._open.enter_context(self._calls.seen())
        if stage in (Stage.COUNTED, Stage.LEAD_IN) and not self._loads_apart:
            self._loads_apart = True
            self._throughout.enter_context(batches_taken(as_one_range))
        if stage is Stage.ISSUED:
            self._start_issuing()
        elif stage is Stage.COUNTED:
            self._watch_evaluations()
            self.count.limit(self._own_s())
            self._begin_lines(complete=False)
            self.count.begin(self.device, self.models, self.optimizers)
        elif stage in (Stage.LEAD_IN, Stage.TRACED):
            self._limit_trace()
            if self.done:
                return
            if not self.trace.running:
                self._prepare_trace()
            if stage is Stage.LEAD_IN and self.trace.running:
                if self.count.operators is None:
                    self.count.limit(self._own_s())
                self._begin_lines(complete=True)
        if stage is Stage.TIMED and not self.readings:
            self.readings.append(self.device.read())
            self._open.enter_context(batches_taken(self._loading))
            self._watch_evaluations()
        self._loaded_ms, self._evaluated, self._tokens, self._epoch_starts = 0.0, 0, 0, 0
        if stage is Stage.TRACED and self.trace.running:
            self.trace.begin(by_edges=self._by_edges)
        self._step_start = self.device.mark()

    def _end(self) -> None:
        stage = self.stage
        assert self._step_start is not None
        end = self.device.mark()
        if stage is Stage.WARMUP:
            self.warmup_s.append(end.host_s - self._step_start.host_s)
            if self._calls is not None:
                self._open.close()
                self.called = self._calls.of(self.models)
        elif stage is Stage.TIMED:
            self.times.append((self._step_start, end))
            self.loading_ms.append(self._loaded_ms)
            self.evaluations.append(self._evaluated)
            self.epoch_starts.append(self._epoch_starts)
            self.tokens.append(self._tokens)
            if len(self.times) == self.effort.timed or self._timed_long():
                self._open.close()
                self.readings.append(self.device.read())
                self.peak_bytes = self._peak()
        elif stage is Stage.ISSUED:
            self.issue.end()
            self._open.close()
        elif stage is Stage.COUNTED:
            self.count.end()
            self.lines.end()
            self._open.close()
            more = self._evaluated > self.usual_evaluations and not self.count.too_many
            if more and self._recounts < MAX_RECOUNTS:
                # Count the next step too; if the program ends before, this count is used.
                self._recounts += 1
                return
        elif stage is Stage.LEAD_IN:
            self.lines.end()
            self.count.operators = self.count.operators or self.lines.operators
        elif stage is Stage.TRACED and self.trace.running:
            self.trace.end()
        self.steps += 1
        if self.stage is Stage.DONE:
            if self._by_edges and self.trace.running:
                self.trace.mark_edge()
            self.finish()

    def _discard(self) -> None:
        stage = self.stage
        if stage is Stage.WARMUP:
            self._open.close()
        elif stage is Stage.ISSUED:
            self.issue.drop()
            self._open.close()
        elif stage is Stage.COUNTED:
            self.count.drop()
            self.lines.drop()
            self._open.close()
            if self._raised_often(stage):
                self.notes["memory_missing"] = (
                    "steps raised exceptions while their tensors were counted"
                )
                self.steps += 1
        elif stage in (Stage.LEAD_IN, Stage.TRACED) and self.trace.running:
            # The mark of the step cannot be removed from the trace.
            self.lines.drop()
            self.trace.drop()
            self.steps = self.effort.steps - self.effort.traced - 1
            if self._raised_often(Stage.TRACED):
                self.notes["trace_missing"] = "steps raised exceptions while they were traced"
                self._close()

    def _raised_often(self, stage: Stage) -> bool:
        self._raised[stage] += 1
        return self._raised[stage] >= MAX_RAISED

    @property
    def cut_short(self) -> str:
        """Progress of the recording, if the program ended early; else empty."""
        if self.steps >= self.effort.steps or self.notes.keys() & _ENDED_EARLY:
            return ""
        # The first step ends at the first edge.
        ran, needed = (steps + self._by_edges for steps in (self.steps, self.effort.steps))
        return f"the program ended after {ran} of the {needed} steps of a recording"

    @property
    def usual_evaluations(self) -> int:
        return min(self.evaluations, default=0)

    def _watch_evaluations(self) -> None:
        def enter(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                self._guarded(lambda: self._count_tokens(arguments, keywords))
            else:
                self._evaluated += 1
            self.between_operators()

        hooks = hooked_roots(self.called, enter, lambda *_: None)
        if hooks is not None:
            self._open.enter_context(hooks)

    def _count_tokens(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._tokens += tokens_in(arguments, keywords)

    @contextmanager
    def _loading(self, batches: Any) -> Iterator[None]:
        workers = getattr(batches, "_num_workers", 0)
        self.loader_workers = max(self.loader_workers, workers)
        self._epoch_starts += bool(workers) and getattr(batches, "_num_yielded", 1) == 0
        start = time.perf_counter()
        try:
            yield
        finally:
            self._loaded_ms += 1e3 * (time.perf_counter() - start)

    def _sampled_loading(self, batches: Any) -> AbstractContextManager[None]:
        """Sample the lines that make a batch, unless workers do."""
        alone = not getattr(batches, "_num_workers", 0)
        return self.loader_lines.sampled() if alone else nullcontext()

    def _start_issuing(self) -> None:
        hooks = self.issue.hooked(self.called)
        if hooks is not None:
            self._open.enter_context(hooks)
            self.issue.begin()

    def _let_device_catch_up(self) -> None:
        # Synchronizing would break a CUDA graph capture.
        capturing = self.device.kind == "cuda" and torch.cuda.is_current_stream_capturing()
        if not capturing:
            self.device.synchronize()

    def _begin_lines(self, *, complete: bool) -> None:
        if not self.count.too_many:
            on_device = self.device.kind == "cuda"
            self.lines.begin(
                self.called,
                self.parameters,
                self.count.most,
                on_device=on_device,
                complete=complete,
            )

    def _own_s(self) -> float:
        """Minimum time that the program itself takes for the steps of this recording."""
        others = self.effort.steps - self.effort.warmup
        return sum(self.warmup_s) + others * self._step_s()

    def _step_s(self) -> float:
        """Mean time of the timed steps so far."""
        return sum(end.host_s - start.host_s for start, end in self.times) / len(self.times)

    def _timed_long(self) -> bool:
        """Return True, and note why, if the timed steps are enough and their time is over."""
        count, step_s = len(self.times), self._step_s()
        if not self.effort.within_s or count < MIN_SAMPLES or count * step_s < self.effort.within_s:
            return False
        self.notes["timed_fewer"] = (
            f"{count} instead of {self.effort.timed}, because a step takes {step_s:.1f} s"
        )
        self.effort = msgspec.structs.replace(self.effort, timed=count)
        return True

    def _limit_trace(self) -> None:
        """Limit the number of traced steps by the operators of a step, none if too many, and by its
        time."""
        if self.trace.steps:
            return
        fits = {}
        if self.count.operators is not None:
            why = f"a step runs {self.count.operators:,} operators"
            fits[why] = self.count.steps_that_fit
        if self.effort.within_s and self.times:
            step_s = self._step_s()
            fits[f"a step takes {step_s:.1f} s"] = max(1, int(self.effort.within_s / step_s))
        why, fit = min(fits.items(), key=lambda one: one[1], default=("", self.effort.traced))
        if not fit:
            self.trace.drop()
            self.notes["trace_missing"] = self.count.why_not("tracing it")
            self._close()
        elif fit < self.effort.traced:
            self.notes["traced_fewer"] = f"{fit} instead of {self.effort.traced}, because {why}"
            self.effort = msgspec.structs.replace(self.effort, traced=fit)

    def _prepare_trace(self) -> None:
        if self.trace.profiler_is_taken:
            # It may have ended by the next step.
            self.notes["trace_missing"] = (
                "the program runs its own profiler: analyze its trace with `stepscope trace`"
            )
            return
        self.notes.pop("trace_missing", None)
        self.trace.prepare(self.device, self.models, self.called)

    def _abandon(self) -> None:
        self.trace.drop()
        self.lines.path.unlink(missing_ok=True)
        self._close()

    def _give_way(self) -> None:
        """Stop tracing because the program starts a profiler; discard the trace."""
        if not self.trace.running:
            return
        self.trace.drop()
        self.notes["trace_missing"] = "the program started its own profiler during the recording"
        self._close()

    def _close(self) -> None:
        if len(self.readings) == 1:
            # The recording ends among its timed steps: the checks need a reading after them.
            self.readings.append(self.device.read())
        self.count.drop()
        self.lines.drop()
        self._open.close()
        self._throughout.close()
        self.done = True

    def _peak(self) -> int | None:
        return self.device.peak_with_graphs() if self.device.kind == "cuda" else None

    def _conclude(self) -> None:
        if self.trace.running:
            self.device.synchronize()
            self.trace.write()
        self.lines.write()
        self.loader_lines.write()
        self._close()

    def _guarded(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            self.notes["recording_failed"] = one_line(error)
            for leave in (self.count.drop, self.lines.drop, self.trace.drop, self._close):
                with suppress(Exception):
                    leave()
            self.done = True
