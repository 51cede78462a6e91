"""The two steps of a recording in which operators are attributed to lines of code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.advisor.lines.observe import LineObserver
from stepscope.files import replace_file
from stepscope.measure.modules import any_compiled

NOTE = "lines_missing"


class StepLines:
    """Call `begin` and `end` around each of these steps, and `write` after the last."""

    def __init__(self, path: Path, notes: dict[str, str]) -> None:
        self.path = path
        self._notes = notes
        self._observer: LineObserver | None = None
        self._on_device = False
        self._active = False
        self._complete = False
        """A step was observed to its end."""
        self._open = ExitStack()

    @property
    def operators(self) -> int | None:
        """Operators of a step; None if no step was observed."""
        return self._observer.operators if self._observer is not None and self._complete else None

    def begin(
        self,
        models: Sequence[torch.nn.Module],
        parameters: Sequence[torch.Tensor],
        most: int,
        *,
        on_device: bool,
        complete: bool,
    ) -> None:
        """Observe a step, of at most so many operators, or only note its values."""
        compiled = any_compiled(models) or _compiles()
        if compiled and not hasattr(TorchDispatchMode, "ignore_compile_internals"):
            self._notes[NOTE] = "this version of torch cannot observe a compiled model"
            return
        if self._observer is None:
            self._observer = LineObserver(parameters, script_folder(), most)
        self._on_device = on_device
        functions = complete and not compiled
        self._open.enter_context(self._observer.observing(complete=complete, functions=functions))
        self._active = complete

    def end(self) -> None:
        self._open.close()
        self._complete = self._complete or self._active
        self._active = False

    def leave_early(self) -> None:
        """End the current step if it runs too many operators. Called between two operators."""
        if self._observer is not None and self._observer.too_many:
            self.end()

    def drop(self) -> None:
        """Discard the current step, which raised an exception."""
        self._open.close()
        if self._active:
            self._observer, self._active = None, False

    def write(self) -> None:
        """Write what was observed, if anything was."""
        self._open.close()
        observer, self._observer = self._observer, None
        if observer is None or not self._complete:
            return
        if observer.too_many or observer.failure:
            why = observer.failure or "a step runs too many operators"
            self._notes[NOTE] = f"no line of code was attributed: {why}"
            return
        result = observer.result(on_device=self._on_device)
        replace_file(self.path, [msgspec.json.encode(result)])


def _compiles() -> bool:
    """Return True if torch.compile has compiled any code."""
    utilities = sys.modules.get("torch._dynamo.utils")
    frames = {} if utilities is None else utilities.counters.get("frames", {})
    return bool(frames.get("ok", 0))


def script_folder() -> Path:
    """The folder of the running script, or the current one."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve().parent if file else Path.cwd()
