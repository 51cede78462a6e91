"""`stepscope.Scope`: recording of steps with three lines in a training loop."""

from __future__ import annotations

import html
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from stepscope.advisor.inspect.gather import with_profile
from stepscope.advisor.scope.recorder import Recorder
from stepscope.advisor.scope.result import make_record
from stepscope.advisor.scope.stages import Effort
from stepscope.analysis.verdict import Verdict
from stepscope.display import html_of
from stepscope.errors import StepscopeError, UsageError
from stepscope.files import replace_file
from stepscope.records.jsonl import write_records
from stepscope.records.schema import Record
from stepscope.report.format import counted


class Scope:
    """Record a few steps of a training loop after its warm-up, and write a page about them.

        scope = stepscope.Scope(model, optimizer)
        for batch in data:
            with scope.step():
                loss = model(batch).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        scope.report("page.html")

    After `warmup` steps, `timed` steps are timed; then, with `memory`, the tensors of one step are
    counted, and `traced` steps are traced by the profiler. The page calls the program `name`.

    A step that is not recorded costs a microsecond. Errors during recording are shown in the report
    and never raised in the loop.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        warmup: int = 5,
        timed: int = 10,
        traced: int = 3,
        memory: bool = True,
        name: str = "your program",
    ) -> None:
        models = _several(model, torch.nn.Module, "model", "an nn.Module")
        optimizers = _several(
            optimizer, torch.optim.Optimizer, "optimizer", "a torch.optim.Optimizer"
        )
        effort = Effort(warmup=warmup, timed=timed, traced=traced, memory=memory)
        self._folder = tempfile.TemporaryDirectory(prefix="stepscope-")
        self._recorder = Recorder(effort, Path(self._folder.name))
        self._recorder.use(models, optimizers)
        self._recorder.watch()
        for one in optimizers:
            one.register_step_pre_hook(self._recorder.optimizer_begins)
            one.register_step_post_hook(self._recorder.optimizer_ended)
        self._name = name
        self._started = time.monotonic()
        self._record: Record | None = None
        self._inside = False

    @property
    def done(self) -> bool:
        """True once everything is recorded; further steps run without overhead."""
        return self._recorder.done

    @property
    def progress(self) -> tuple[int, int]:
        """Number of steps so far, and the number that a complete recording takes."""
        return self._recorder.steps, self._recorder.effort.steps

    def next_step(self) -> None:
        """End a step and begin the next, in a callback, where no `with` block surrounds a step. The
        first call begins the first step; everything between two calls is one step."""
        if not self._recorder.done:
            self._recorder.edge()

    def close(self) -> None:
        """End the recording early; what it has so far can still be reported."""
        self._recorder.finish()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context around one training step, including the loading of its data."""
        if self._recorder.done:
            yield
            return
        if self._inside:
            raise UsageError("scope.step() is nested", "leave the outer step first")
        self._inside = True
        self._recorder.begin()
        try:
            yield
        except BaseException:
            self._recorder.discard()
            raise
        else:
            self._recorder.end()
        finally:
            self._inside = False

    def _repr_html_(self) -> str:
        if self.done and self._recorder.times:
            return html_of(self.record())
        steps, needed = self.progress
        failed = self._recorder.notes.get("recording_failed")
        state = f"the recording failed: {failed}" if failed else f"step {steps} of {needed}"
        return f"<p>Stepscope: {html.escape(state)}</p>"

    def record(self) -> Record:
        """Return the record of the steps, as `stepscope report` reads it from a file."""
        if self._record is None:
            self._recorder.finish()
            failed = self._recorder.notes.get("recording_failed")
            if failed and not self._recorder.times:
                raise StepscopeError(f"the recording failed: {failed}")
            if not self._recorder.times:
                steps, needed = self.progress
                raise StepscopeError(
                    f"{counted(steps, 'step')} ran, but the recording needs {needed}",
                    "run more steps, or choose a smaller `warmup`",
                )
            elapsed = time.monotonic() - self._started
            bare = make_record(self._recorder, self._name, (), elapsed)
            bare = msgspec.structs.replace(bare, notes=bare.notes | {"command": _command()})
            self._record = with_profile(bare, Path(self._folder.name))
        return self._record

    def verdict(self) -> Verdict | None:
        """Return the verdict on the recorded steps: their time, breakdown and best changes."""
        from stepscope.studies.page import verdict_of

        return verdict_of([self.record()])

    def report(self, path: str | Path) -> Path:
        """Write the page and, next to it, its record (.jsonl); return the path of the page."""
        from stepscope.report.html import html_page
        from stepscope.studies.page import make_page

        page = Path(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        records = [self.record()]
        replace_file(page, [html_page(make_page(records)).encode(errors="backslashreplace")])
        write_records(records, page.with_suffix(".jsonl"))
        return page


def _command() -> str:
    """The running script or module and its arguments; empty in a notebook, which has none."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return shlex.join(["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]])
    path = getattr(main, "__file__", None)
    return shlex.join(sys.argv) if path and Path(path) == Path(sys.argv[0]) else ""


Kind = TypeVar("Kind")


def _several(given: object, kind: type[Kind], what: str, wanted: str) -> tuple[Kind, ...]:
    objects = (
        tuple(given) if isinstance(given, Iterable) and not isinstance(given, kind) else (given,)
    )
    for one in objects:
        if not isinstance(one, kind):
            actual = type(one).__name__
            raise UsageError(f"the {what} of a Scope has type {actual}", f"give it {wanted}")
    return objects
