"""Observer of a script in its own process: detects training steps and records some of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stepscope.advisor.inspect.progress import CHILD_STEPPED, Progress, write_progress
from stepscope.advisor.scope.following import StepFollower
from stepscope.advisor.scope.stages import Effort
from stepscope.advisor.scope.torch_import import when_imported
from stepscope.errors import one_line, tells_of_memory

if TYPE_CHECKING:
    from stepscope.advisor.scope.recorder import Recorder


class Watcher(StepFollower):
    """Observer of one process. Torch is not touched before the script has imported it."""

    def __init__(
        self,
        folder: Path,
        effort: Effort,
        name: str,
        words: list[str],
        *,
        stop: bool,
        plans: Literal["auto", "yes", "no"] = "no",
    ) -> None:
        super().__init__()
        self._folder = folder
        self._effort = effort
        self._name, self._words = name, words
        self._stop = stop
        self._plans = plans
        self._recorder: Recorder | None = None
        self._in_child = False
        self._child_marked = False
        self._searched = False
        self._trained: list[int] | None = None
        """Ids of the parameters whose models were searched for."""
        self._written = False
        self._torch = False
        self._failure = self._out_of_memory = ""
        self._started = time.monotonic()

    def start(self) -> None:
        when_imported("torch", lambda: self._guarded(self._attach))
        os.register_at_fork(after_in_child=self._disable_in_child)

    def finish(self) -> None:
        """Write what was recorded when the script ends, with or without an error."""
        if not self._in_child:
            self._guarded(self._finish)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run an action; an error in it ends the recording, never the script."""
        try:
            action()
        except Exception as error:
            self._failure = one_line(error)
            if self._recorder is not None:
                self._recorder.finish()
            with suppress(Exception):
                self._report_progress()

    def _finish(self) -> None:
        error = sys.exc_info()[1]
        if error is not None and tells_of_memory(line := one_line(error)):
            self._out_of_memory = line
        self.unfollow()
        if self._recorder is not None:
            self._recorder.finish()
            self._write()
        self._report_progress()

    def _attach(self) -> None:
        from stepscope.advisor.lines.loader import LoaderLines
        from stepscope.advisor.lines.recording import script_folder

        self.follow()
        self._torch = True
        loaders = LoaderLines(self._folder, self._rank_name, script_folder())
        loaders.attach()
        self._following.append(loaders)
        self._report_progress()

    def _optimizer_begins(self, optimizer: Any, arguments: Any, keywords: Any) -> Any:
        if self._recording:
            self._guarded(partial(super()._optimizer_begins, optimizer))
        if self._recorder is None or not self._recording:
            return None
        return self._recorder.optimizer_begins(optimizer, arguments, keywords)

    def _optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        if self._in_child:
            self._guarded(self._mark_child_stepped)
        elif self._recording:
            self._guarded(partial(super()._optimizer_stepped, optimizer))

    def _backward_begins(self, roots: Any) -> None:
        if self._recording:
            self._guarded(partial(super()._backward_begins, roots))

    def _backward_ended(self) -> None:
        if self._recording:
            self._guarded(super()._backward_ended)

    @property
    def _recording(self) -> bool:
        ended = self._recorder is not None and self._recorder.done
        return not (ended or self._failure or self._written or self._in_child)

    def on_misdetected(self) -> None:
        if self._recorder is not None:
            self._recorder.abandon()
            self._recorder, self._searched, self._trained = None, False, None

    def on_optimizer_stepped(self, optimizer: Any) -> None:  # noqa: ARG002
        if self._recorder is not None:
            self._recorder.optimizer_ended()

    def on_backward(self, roots: Any) -> None:  # noqa: ARG002
        if self._recorder is not None:
            self._recorder.between_operators()

    def end_step(self) -> None:
        if not self._recording:
            return
        recorder = self._recorder or self._begin()
        if not self._searched:
            self._search(recorder)
        recorder.edge()
        if recorder.done and not self._plan(recorder):
            self._conclude()

    def _begin(self) -> Recorder:
        from stepscope.advisor.scope.recorder import Recorder

        self._recorder = Recorder(self._effort, self._folder, self._rank_name)
        self._use((), self._recorder)
        self._recorder.watch()
        self._report_progress()
        return self._recorder

    @property
    def _rank_name(self) -> str:
        return f"rank-{os.environ.get('RANK', '0')}"

    def _search(self, recorder: Recorder) -> None:
        """Find the models after the first step: the search takes a tenth of a second, in which the
        workers of a DataLoader load ahead, and the steps after it would not wait for them. Search
        again before and after the last warm-up step, in which calls of the models are observed, if
        other optimizers have stepped by then."""
        self._searched = recorder.steps >= self._effort.warmup - 1
        if self._searched:
            self._finder.anchor.freeze()
        trained = [id(one) for one in self._finder.parameters]
        late = recorder.steps >= self._effort.warmup - 2
        if self._trained is None or (late and trained != self._trained):
            self._trained = trained
            self._find_models(recorder)
        elif late:
            self._use(recorder.models, recorder)

    def _find_models(self, recorder: Recorder) -> None:
        from stepscope.measure.modules import trained_models

        self._use(trained_models(self._finder.parameters), recorder)

    def _use(self, models: Sequence[Any], recorder: Recorder) -> None:
        optimizers = tuple(self._finder.optimizers.values())
        recorder.use(models, optimizers, self._finder.parameters)

    def _plan(self, recorder: Recorder) -> bool:
        """Watch one more step to plan its memory; return False if that is not wanted or not
        possible."""
        if self._plans == "no" or (self._plans == "auto" and recorder.device.kind != "cuda"):
            return False
        if self._failure or not recorder.times or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return False
        if len(recorder.models) != 1 or len(recorder.optimizers) != 1:
            recorder.notes["plans_missing"] = "the program trains several models"
            return False
        from stepscope.advisor.scope.loop_plans import LoopPlans
        from stepscope.advisor.scope.trained_calls import Trained

        def planned() -> None:
            recorder.plans = plans.planned
            if plans.failure:
                recorder.notes["plans_missing"] = plans.failure
            self._guarded(self._conclude)

        plans = LoopPlans(Trained(recorder.models[0], recorder.optimizers[0]), planned)
        plans.attach()
        return True

    def _conclude(self) -> None:
        self._write()
        self._finder.optimizers.clear()
        self._report_progress()
        if self._stop:
            sys.exit(0)

    def _write(self) -> None:
        recorder = self._recorder
        if recorder is None or self._written or self._failure or not recorder.times:
            return
        from stepscope.advisor.scope.result import make_record
        from stepscope.records.jsonl import write_records

        self._written = True
        elapsed = time.monotonic() - self._started
        record = make_record(recorder, self._name, self._words, elapsed)
        write_records([record], self._folder / f"rank-{record.config['rank']}.jsonl")

    def _disable_in_child(self) -> None:
        """Disable recording in a forked child process."""
        self._in_child = True

    def _report_progress(self) -> None:
        recorder = self._recorder
        anchor = self._finder.anchor if self._torch else None
        broken_off = "" if recorder is None else recorder.notes.get("recording_failed", "")
        write_progress(
            self._folder,
            Progress(
                torch=self._torch,
                optimizer_steps=0 if anchor is None else anchor.steps,
                optimizers=0 if anchor is None else anchor.optimizers,
                steps=0 if recorder is None else recorder.steps,
                needed=(self._effort if recorder is None else recorder.effort).steps,
                recorded=self._written,
                out_of_memory=self._out_of_memory,
                failure=self._failure or broken_off,
            ),
        )

    def _mark_child_stepped(self) -> None:
        if self._in_child and not self._child_marked:
            self._child_marked = True
            (self._folder / CHILD_STEPPED).touch()
