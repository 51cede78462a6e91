"""Observe a program within this process, and load the single record that it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.advisor.inspect.gather import gather
from stepscope.advisor.scope.stages import Effort
from stepscope.advisor.scope.watching import Watcher
from stepscope.views.program.rows import ProgramRecord


@contextmanager
def watching(folder: Path, stop: bool = False, traced: int = 2) -> Iterator[Watcher]:
    effort = Effort(warmup=2, timed=5, traced=traced)
    watcher = Watcher(folder, effort, "train.py", ["--fast"], stop=stop)
    watcher.start()
    try:
        yield watcher
    finally:
        watcher.finish()


def only(folder: Path) -> ProgramRecord:
    (record,) = gather(folder)
    return ProgramRecord(record)
