"""Writing of an observer's lines in a thread of its own: a slow disk never holds up a step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import msgspec

from stepscope.analysis.observed.lines import Line, Start, rank_file
from stepscope.files import open_regular

MAX_BYTES = 64 << 20
"""Size at which a file is moved aside; one earlier file is kept."""
_IDLE_S = 0.25
_CLOSE_WITHIN_S = 60.0


class Writer:
    """Appends lines to a rank's file, each as soon as it is put. `then` is called in the thread
    with each of them and returns further lines; `idle` is called several times a second."""

    def __init__(
        self,
        folder: Path,
        start: Start,
        then: Callable[[Line], Iterable[Line]],
        idle: Callable[[], Iterable[Line]],
        failed: Callable[[Exception], None],
    ) -> None:
        self._path = rank_file(folder, start.rank)
        self._start = start
        self._then, self._idle, self._failed = then, idle, failed
        self._queue: SimpleQueue[Line | Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="stepscope-observer", daemon=True)
        self._file = -1
        self._size = 0
        self._idled = 0.0

    def start(self) -> None:
        """Open the file, and start the thread."""
        self._open()
        self._thread.start()

    def put(self, line: Line | Callable[[], None]) -> None:
        """Write a line, or call a function, in the thread."""
        self._queue.put(line)

    def close(self) -> None:
        """Write what is left, and end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(_CLOSE_WITHIN_S)

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_IDLE_S)
                if item is None:
                    self._write(self._idle())
                    os.close(self._file)
                    return
                if callable(item):
                    item()
                else:
                    self._write([item])
            except Empty:
                pass
            except Exception as error:
                self._failed(error)
            self._idle_at_times()

    def _idle_at_times(self) -> None:
        began = time.monotonic()
        if began - self._idled < _IDLE_S:
            return
        try:
            self._write(self._idle())
        except Exception as error:
            self._failed(error)
        # At most a tenth of the time, however many files there are.
        self._idled = time.monotonic() + 9.0 * (time.monotonic() - began)

    def _write(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self._append(line)
            self._write(self._then(line))

    def _append(self, line: Line) -> None:
        if self._size > MAX_BYTES:
            os.close(self._file)
            self._open()
        data = msgspec.json.encode(line) + b"\n"
        self._size += os.write(self._file, data)

    def _open(self) -> None:
        """Begin a file; that of an earlier job, or one that is full, is moved aside."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._path.replace(self._path.with_suffix(".jsonl.1"))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = open_regular(self._path, flags)
        self._size = os.write(self._file, msgspec.json.encode(self._start) + b"\n")
