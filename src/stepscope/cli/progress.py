"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from stepscope.analysis.limits import step_ms
from stepscope.analysis.trust import trust_of
from stepscope.cli.messages import write_line
from stepscope.errors import printable
from stepscope.records.schema import Record, Run
from stepscope.report.format import counted, duration
from stepscope.studies.base import PlannedCase
from stepscope.studies.runner.protocol import Progress


def outcome(record: Record) -> str:
    """Summarize a record: its step time and lint codes, or its status and reason."""
    if record.status != "ok":
        return f"{record.status}: {record.reason}"
    step = step_ms(record)
    text = duration(step.median) if step else "ok"
    lints = ", ".join(lint.code for lint in record.lints)
    return f"{text} ({lints})" if lints else text


def waiting_text(up_to_s: float, used: float, cores: int) -> str:
    return (
        f"waiting up to {up_to_s:.3g} s (--wait): other processes use {used:.2g} of"
        f" {counted(cores, 'core')}"
    )


def again_text(record: Record) -> str:
    return f"{record.study} {record.case}: {trust_of(record).reason}; measuring it again"


class PlainLines:
    """Progress as one line per case on standard error."""

    def __init__(self, run: Run, total: int, done: int) -> None:
        self._total = total
        self._done = done
        self._case: PlannedCase | None = None
        self._calibrating = False
        cases = f": {counted(total, 'case')}, {done} already done" if total else ""
        write_line(f"run {run.id}{cases}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def calibrating(self, progress: Progress) -> None:  # noqa: ARG002
        if not self._calibrating:
            write_line("measuring this machine's ceilings (once, takes up to a minute)")
            self._calibrating = True

    def case_started(self, case: PlannedCase) -> None:
        self._case = case
        # Results may add cases: `advise --verify` plans trials as it goes.
        self._total = max(self._total, self._done + 1)

    def case_progress(self, progress: Progress) -> None: ...

    def case_finished(self, record: Record) -> None:
        self._done += 1
        write_line(f"[{self._done}/{self._total}] {record.study} {record.case}: {outcome(record)}")

    def waiting(self, up_to_s: float, used: float, cores: int) -> None:
        write_line(waiting_text(up_to_s, used, cores))

    def measuring_again(self, record: Record) -> None:
        write_line(again_text(record))


class Bar:
    """Progress bar with the running case, the counts and the estimated time left."""

    def __init__(self, run: Run, total: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=Console(stderr=True),
        )
        self._bar.console.print(f"run {run.id}", markup=False, highlight=False)
        self._task = self._bar.add_task("starting", total=total, completed=done, left="")
        self._total, self._at_start, self._done = total, done, done
        self._started = time.monotonic()
        self._case = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def calibrating(self, progress: Progress) -> None:
        self._bar.update(self._task, description=f"measuring ceilings: {progress.what}")
        self._started = time.monotonic()

    def case_started(self, case: PlannedCase) -> None:
        self._case = f"{case.study} {case.key}"
        self._total = max(self._total, self._done + 1)
        self._bar.update(self._task, description=self._case, total=self._total)

    def case_progress(self, progress: Progress) -> None:
        text = f"{self._case} {progress.what} {progress.done}/{progress.total}"
        self._bar.update(self._task, description=printable(text))

    def case_finished(self, record: Record) -> None:
        self._done += 1
        self._print(f"{record.study} {record.case}: {outcome(record)}")
        self._update_estimate()

    def waiting(self, up_to_s: float, used: float, cores: int) -> None:
        self._print(waiting_text(up_to_s, used, cores))

    def measuring_again(self, record: Record) -> None:
        self._print(again_text(record))

    def _print(self, text: str) -> None:
        self._bar.console.print(printable(text), markup=False, highlight=False)

    def _update_estimate(self) -> None:
        pace = (time.monotonic() - self._started) / (self._done - self._at_start)
        left = pace * (self._total - self._done)
        self._bar.update(
            self._task, completed=self._done, left=f"about {duration(left * 1e3, 2)} left"
        )


def make_observer(run: Run, total: int, done: int) -> PlainLines | Bar:
    return (Bar if sys.stderr.isatty() else PlainLines)(run, total, done)
