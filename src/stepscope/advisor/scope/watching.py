"""Watches a script from within its process: finds its steps and has some of them recorded."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.advisor.inspect.progress import CHILD_STEPPED, Progress, write_progress
from stepscope.advisor.scope.stages import Effort
from stepscope.advisor.scope.torch_import import when_imported
from stepscope.errors import one_line

if TYPE_CHECKING:
    from stepscope.advisor.scope.recorder import Recorder
    from stepscope.advisor.scope.steps import StepFinder


class Watcher:
    """One for a process. Nothing of torch is touched before the script has imported it."""

    def __init__(
        self, folder: Path, effort: Effort, name: str, words: list[str], *, stop: bool
    ) -> None:
        self._folder = folder
        self._effort = effort
        self._name, self._words = name, words
        self._stop = stop
        self._finder: StepFinder | None = None
        self._hooks: list[Any] = []
        self._recorder: Recorder | None = None
        self._in_child = False
        self._noted = False
        self._searched = False
        self._written = False
        self._torch = False
        self._failure = ""
        self._started = time.monotonic()

    def start(self) -> None:
        when_imported("torch", lambda: self._undisturbed(self._attach))
        os.register_at_fork(after_in_child=self._forget)

    def finish(self) -> None:
        """The script has ended, well or not."""
        if not self._in_child:
            self._undisturbed(self._finish)

    def _undisturbed(self, action: Callable[[], None]) -> None:
        """What goes wrong ends the recording, and never the script."""
        try:
            action()
        except Exception as error:
            self._failure = one_line(error)
            if self._recorder is not None:
                self._recorder.finish()
            with suppress(Exception):
                self._say()

    def _finish(self) -> None:
        self._detach()
        if self._recorder is not None:
            self._recorder.finish()
            self._write()
        self._say()

    def _attach(self) -> None:
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        from stepscope.advisor.scope.steps import BackwardCalls, StepFinder

        self._torch = True
        self._finder = StepFinder()
        backwards = BackwardCalls(self._backward_begins, self._backward_ended)
        backwards.attach()
        self._hooks = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_stepped),
            backwards,
        ]
        self._say()

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _optimizer_begins(self, optimizer: Any, arguments: Any, keywords: Any) -> Any:
        if self._records:
            self._undisturbed(lambda: self._see_optimizer(optimizer))
        if self._recorder is None or not self._records:
            return None
        return self._recorder.optimizer_begins(optimizer, arguments, keywords)

    def _optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        if self._in_child:
            self._undisturbed(self._note_child)
        elif self._records:
            self._undisturbed(lambda: self._see_step(optimizer))

    def _backward_begins(self, roots: Any) -> None:
        if self._records:
            self._undisturbed(lambda: self._see_backward(roots))

    def _backward_ended(self) -> None:
        if self._records:
            self._undisturbed(self._see_end_of_backward)

    @property
    def _records(self) -> bool:
        ended = self._recorder is not None and self._recorder.done
        return not (ended or self._failure or self._written or self._in_child)

    def _see_optimizer(self, optimizer: Any) -> None:
        if self._found.optimizer_begins(optimizer) and self._recorder is not None:
            self._recorder.abandon()
            self._recorder, self._searched = None, False

    def _see_step(self, optimizer: Any) -> None:
        if self._recorder is not None:
            self._recorder.optimizer_ended()
        if self._found.optimizer_stepped(optimizer):
            self._end_step()

    def _see_backward(self, roots: Any) -> None:
        if self._recorder is not None:
            self._recorder.between_operators()
        self._found.backward_begins(roots)

    def _see_end_of_backward(self) -> None:
        if self._found.backward_ended():
            self._end_step()

    @property
    def _found(self) -> StepFinder:
        assert self._finder is not None
        return self._finder

    def _end_step(self) -> None:
        recorder = self._recorder or self._begin()
        if not self._searched and recorder.steps >= self._effort.warmup - 2:
            # Ahead of the last step of the warm-up, in which their calls are looked at; and after
            # it, when all optimizers have stepped.
            self._searched = recorder.steps >= self._effort.warmup - 1
            if self._searched:
                self._found.anchor.freeze()
            self._find_models(recorder)
        recorder.edge()
        if recorder.done:
            self._conclude()

    def _begin(self) -> Recorder:
        from stepscope.advisor.scope.recorder import Recorder

        rank = os.environ.get("RANK", "0")
        self._recorder = Recorder(self._effort, self._folder, f"rank-{rank}")
        self._use((), self._recorder)
        self._recorder.watch()
        self._say()
        return self._recorder

    def _find_models(self, recorder: Recorder) -> None:
        from stepscope.measure.modules import trained_models

        self._use(trained_models(self._found.parameters), recorder)

    def _use(self, models: Sequence[Any], recorder: Recorder) -> None:
        optimizers = tuple(self._found.optimizers.values())
        recorder.use(models, optimizers, self._found.parameters)

    def _conclude(self) -> None:
        self._write()
        self._found.optimizers.clear()
        self._say()
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

    def _forget(self) -> None:
        """In a process that the script forks, nothing is recorded."""
        self._in_child = True

    def _say(self) -> None:
        recorder = self._recorder
        anchor = None if self._finder is None else self._finder.anchor
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
                failure=self._failure or broken_off,
            ),
        )

    def _note_child(self) -> None:
        if self._in_child and not self._noted:
            self._noted = True
            (self._folder / CHILD_STEPPED).touch()
