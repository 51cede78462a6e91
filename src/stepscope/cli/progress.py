"""Progress of a run: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Self

import psutil

from stepscope.analysis.limits import step_ms
from stepscope.analysis.trust import trust_of
from stepscope.cli.messages import write_line
from stepscope.errors import printable
from stepscope.records.schema import Record, Run
from stepscope.report.format import counted, duration
from stepscope.runner.estimate import TimeLeft
from stepscope.runner.load import SHORT_BY, OtherWork
from stepscope.runner.protocol import Progress
from stepscope.runner.words import case_words
from stepscope.studies.base import PlannedCase
from stepscope.studies.registry import viewables

if TYPE_CHECKING:
    from rich.text import Text


_SLOWER = 1.5
"""Time of the finished cases, relative to the expected one, from which it is explained."""
CEILINGS_LINE = "measuring this machine's ceilings: matmul rate, bandwidth, launch rate"


def outcome(record: Record) -> str:
    """Summarize a record: its step time and failed checks, or its status and reason."""
    if record.status != "ok":
        return f"{record.status}: {record.reason}"
    step = step_ms(record)
    study = viewables().get(record.study)
    text = (study and study.outcome(record)) or (duration(step.median) if step else "ok")
    failed = ", ".join(check.code for check in record.failed_checks)
    return f"{text} ({failed})" if failed else text


def waiting_text(up_to_s: float, used: float, cores: int) -> str:
    return (
        f"waiting up to {up_to_s:.3g} s (--wait): other processes use {used:.2g} of"
        f" {counted(cores, 'core')}"
    )


def slower_text(pace: float, used: float, cores: int) -> str:
    """Why the rest of a run takes longer than expected."""
    text = f"cases take {pace:.1f} times as long as expected, and so will the rest"
    if used < SHORT_BY * cores:
        return f"{text}; no other process uses much of the CPU"
    return f"{text}: other processes use {used:.2g} of {counted(cores, 'core')}"


def again_text(record: Record) -> str:
    return f"{_named(record)}: {trust_of(record).reason}; measuring it again"


class _Progress:
    """Counts, elapsed time and expected time of a run; `left` is None where nothing is known."""

    def __init__(self, run: Run, total: int, done: int, left: TimeLeft | None) -> None:
        self._total, self._done, self._left = total, done, left
        self._started = time.monotonic()
        self._skipped: Counter[str] = Counter()
        self._others = OtherWork()
        self._told = _SLOWER / 2
        """The pace that was reported last."""
        self._write(_first_line(run, total, done, left))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if skipped := sum(self._skipped.values()):
            self._write(f"{counted(skipped, 'case')} skipped:")
            for reason, times in self._skipped.most_common():
                self._write(f"  {times}: {reason}")

    def case_started(self, case: PlannedCase) -> None:  # noqa: ARG002
        # Results may add cases: `advise --verify` plans trials as it goes.
        self._total = max(self._total, self._done + 1)

    def case_progress(self, progress: Progress) -> None: ...

    def case_finished(self, record: Record) -> None:
        self._done += 1
        if self._left is not None:
            seconds = 0.0 if record.status == "skipped" else record.elapsed_s
            self._left.finished(record.study, record.case, seconds)
        if record.status == "skipped":
            self._skipped[record.reason] += 1
        else:
            self._explain_pace()
            self._report(record)

    def _explain_pace(self) -> None:
        """Say why the expected time grows, each time that cases take twice as long again."""
        pace = 1.0 if self._left is None else self._left.pace()
        if pace < 2 * self._told:
            return
        self._told = pace
        self._write(slower_text(pace, self._others.cores(), psutil.cpu_count() or 1))

    def waiting(self, up_to_s: float, used: float, cores: int) -> None:
        self._write(waiting_text(up_to_s, used, cores))

    def measuring_again(self, record: Record) -> None:
        self._write(again_text(record))

    def _report(self, record: Record) -> None:
        raise NotImplementedError

    def _write(self, text: str) -> None:
        write_line(text)

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def _left_s(self) -> float | None:
        if self._left is None or self._done >= self._total:
            return None
        return self._left.seconds()


class PlainLines(_Progress):
    """Progress as one line per case on standard error."""

    def __init__(self, run: Run, total: int, done: int, left: TimeLeft | None = None) -> None:
        super().__init__(run, total, done, left)
        self._calibrating = False

    def calibrating(self, progress: Progress) -> None:  # noqa: ARG002
        if not self._calibrating:
            self._write(CEILINGS_LINE)
            self._calibrating = True

    def _report(self, record: Record) -> None:
        times = _times(self._elapsed_s, self._left_s())
        self._write(f"[{self._done}/{self._total}] {_named(record)}: {outcome(record)} ({times})")


class LiveLine(_Progress):
    """Progress as one line of a terminal, with the running case; failures stay above it."""

    def __init__(self, run: Run, total: int, done: int, left: TimeLeft | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, highlight=False)
        super().__init__(run, total, done, left)
        self._what = "starting"
        self._expected: tuple[float, float] | None = None
        """Seconds left, and when that was computed."""
        self._expect()
        self._live = Live(get_renderable=self._line, console=self._console, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        if self._total:
            self._write(
                f"{self._done} of {counted(self._total, 'case')} in {_clock(self._elapsed_s)}"
            )
        super().__exit__()

    def calibrating(self, progress: Progress) -> None:
        self._what = f"measuring this machine's ceilings: {progress.what}"

    def case_started(self, case: PlannedCase) -> None:
        super().case_started(case)
        self._case = self._what = f"{case.study}: {case_words(case.study, case.key, case.config)}"

    def case_progress(self, progress: Progress) -> None:
        self._what = f"{self._case}, {progress.what} {progress.done}/{progress.total}"

    def _report(self, record: Record) -> None:
        if record.status != "ok":
            self._write(f"{_named(record)}: {outcome(record)}")
        self._expect()

    def _expect(self) -> None:
        left = self._left_s()
        self._expected = None if left is None else (left, time.monotonic())

    def _write(self, text: str) -> None:
        self._console.print(printable(text), markup=False)

    def _line(self) -> Text:
        from rich.text import Text

        left = None
        if self._expected is not None:
            left = max(0.0, self._expected[0] - (time.monotonic() - self._expected[1]))
        count = f"[{self._done}/{self._total}] " if self._total else ""
        line = Text(f"{count}{_times(self._elapsed_s, left)}  {printable(self._what)}")
        line.truncate(self._console.width - 1, overflow="ellipsis")
        return line


def _first_line(run: Run, total: int, done: int, left: TimeLeft | None) -> str:
    if not total:
        return f"run {run.id}"
    text = f"run {run.id}: {counted(total, 'case')}" + (f", {done} already done" if done else "")
    seconds = None if left is None else left.seconds()
    if left is None or seconds is None or done >= total:
        return text
    return f"{text}, about {_in_words(seconds + left.start_s)}"


def _in_words(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _named(record: Record) -> str:
    return f"{record.study} {case_words(record.study, record.case, record.config)}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _times(elapsed_s: float, left_s: float | None) -> str:
    elapsed = _clock(elapsed_s)
    return elapsed if left_s is None else f"{elapsed}, about {_clock(left_s)} left"


def make_observer(
    run: Run, total: int, done: int, left: TimeLeft | None = None
) -> PlainLines | LiveLine:
    return (LiveLine if sys.stderr.isatty() else PlainLines)(run, total, done, left)


class Calibrating:
    """Observer for commands that measure only ceilings, and only if they are not cached."""

    def __init__(self) -> None:
        self._logged = False

    def calibrating(self, progress: Progress) -> None:  # noqa: ARG002
        if not self._logged:
            write_line(CEILINGS_LINE)
            self._logged = True
