"""Watches a script from within its process: finds its steps and has some of them recorded."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import one_line
from stepscope.scope.anchor import Anchor
from stepscope.scope.arrival import when_imported
from stepscope.scope.stages import Effort
from stepscope.studies.inspected.progress import CHILD_STEPPED, Progress, write_progress

if TYPE_CHECKING:
    from stepscope.scope.recorder import Recorder


class Watcher:
    """One for a process. Nothing of torch is touched before the script has imported it."""

    def __init__(
        self, folder: Path, effort: Effort, name: str, words: list[str], *, stop: bool
    ) -> None:
        self._folder = folder
        self._effort = effort
        self._name, self._words = name, words
        self._stop = stop
        self._anchor = Anchor()
        self._optimizers: dict[int, Any] = {}
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
        for hook in self._hooks:
            hook.remove()
        if self._recorder is not None:
            self._recorder.finish()
            self._write()
        self._say()

    def _attach(self) -> None:
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._torch = True
        self._hooks = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_stepped),
        ]
        self._say()

    def _optimizer_begins(self, *_: Any) -> None:
        if self._recorder is not None:
            self._recorder.optimizing(True)

    def _optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        if not self._failure:
            self._undisturbed(lambda: self._see_step(optimizer))

    def _see_step(self, optimizer: Any) -> None:
        if self._written or self._in_child:
            self._note_child()
            return
        if self._recorder is not None:
            self._recorder.optimizing(False)
            if self._recorder.done:
                return
        self._optimizers.setdefault(id(optimizer), optimizer)
        if not self._anchor.ends_step(id(optimizer)):
            return
        recorder = self._recorder or self._begin()
        if recorder.steps >= self._effort.warmup - 1 and not self._searched:
            self._searched = True
            self._anchor.freeze()
            self._find_models(recorder)
        recorder.edge()
        if recorder.done:
            self._conclude()

    def _begin(self) -> Recorder:
        from stepscope.scope.recorder import Recorder

        rank = os.environ.get("RANK", "0")
        self._recorder = Recorder(self._effort, self._folder, f"rank-{rank}")
        self._recorder.use((), tuple(self._optimizers.values()))
        self._recorder.watch()
        self._say()
        return self._recorder

    def _find_models(self, recorder: Recorder) -> None:
        from stepscope.measure.modules import trained_models

        optimizers = tuple(self._optimizers.values())
        parameters = (p for o in optimizers for group in o.param_groups for p in group["params"])
        recorder.use(trained_models(parameters), optimizers)

    def _conclude(self) -> None:
        self._write()
        self._optimizers.clear()
        self._say()
        if self._stop:
            sys.exit(0)

    def _write(self) -> None:
        recorder = self._recorder
        if recorder is None or self._written or self._failure or not recorder.times:
            return
        from stepscope.records.jsonl import write_records
        from stepscope.scope.result import make_record

        self._written = True
        elapsed = time.monotonic() - self._started
        record = make_record(recorder, self._name, self._words, elapsed)
        write_records([record], self._folder / f"rank-{record.config['rank']}.jsonl")

    def _forget(self) -> None:
        """In a process that the script forks, nothing is recorded."""
        self._in_child = True

    def _say(self) -> None:
        recorder = self._recorder
        broken_off = "" if recorder is None else recorder.notes.get("recording_failed", "")
        write_progress(
            self._folder,
            Progress(
                torch=self._torch,
                optimizer_steps=self._anchor.steps,
                optimizers=self._anchor.optimizers,
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
