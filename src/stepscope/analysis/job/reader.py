"""Processes that read the traces of a job, several at once.

Started like every process of Stepscope (`stepscope.processes`) and not by `multiprocessing`, whose
helper processes import from the current folder. If a reader dies, the file that it was reading is
reported and the others are read.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, cast

from stepscope.errors import StepscopeError
from stepscope.processes import own_command, signal_name

if TYPE_CHECKING:
    from stepscope.analysis.job.rank import RankTrace

_FIX = "the machine may be out of memory: read fewer files at once with --workers"


def read_in_processes(
    files: Sequence[Path], workers: int
) -> Iterator[tuple[Path, RankTrace | str]]:
    """Yield each file with its trace, or with the reason why it was not read, in any order."""
    idle: SimpleQueue[Reader | None] = SimpleQueue()
    started: list[Reader] = []
    for _ in range(workers):
        idle.put(None)

    def read(path: Path) -> RankTrace | str:
        reader = idle.get()
        try:
            if reader is None:
                reader = Reader()
                started.append(reader)
            return reader.read(path)
        finally:
            idle.put(reader if reader is not None and reader.alive else None)

    # Not started by a `with` statement: an interrupt would wait for the files in progress.
    pool = ThreadPoolExecutor(workers)
    try:
        futures = {pool.submit(read, path): path for path in files}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for reader in started:
            reader.end()


class Reader:
    """A process that reads one file after the other."""

    def __init__(self) -> None:
        self._line, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                own_command("stepscope.analysis.job.reader", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C reaches only the command, which ends its readers.
                start_new_session=True,
            )
        self.alive = True

    def read(self, path: Path) -> RankTrace | str:
        try:
            self._line.send_bytes(str(path.absolute()).encode(errors="surrogateescape"))
            return cast("RankTrace | str", self._line.recv())
        except (OSError, EOFError):
            self.alive = False
            code = self._process.wait()
            end = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
            return str(StepscopeError(f"the process that read {path} {end}", _FIX))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._line.close()


def main(line: Connection, read: Callable[[Path], object]) -> None:
    """Answer with the trace of each file, until the command closes the line."""
    while True:
        try:
            path = Path(line.recv_bytes().decode(errors="surrogateescape"))
        except EOFError:
            return
        try:
            answer = read(path)
        except StepscopeError as error:
            answer = str(error)
        line.send(answer)


if __name__ == "__main__":
    from stepscope.analysis.job.rank import read_rank

    main(Connection(int(sys.argv[1])), read_rank)
