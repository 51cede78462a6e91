"""Two runs of one script that take turns, seen from whoever lets them: no torch here.

Between its turns a run is stopped with all its processes, so that a loader cannot work ahead while
the other one is timed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import msgspec

from stepscope.advisor.inspect.order import Order
from stepscope.errors import StepscopeError, in_one_line
from stepscope.records.decoding import from_json
from stepscope.studies.runner.descendants import end_tagged, new_tag, tagged

_LOOK_UP_EVERY_S = 0.5
_LONGEST_LINE = 1 << 26
"""Bytes; a turn's losses take 20 each."""
_LAST_LINES = 20
"""An error of torch may have lines of advice after its own."""
_TRACEBACK = "Traceback (most recent call last)"


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The warm-up is over."""

    step_ms: float
    """Of its last step."""
    losses: list[float | None]
    missing: list[str] = []
    """Settings that found nothing to change."""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A turn is over."""

    step_ms: float
    """Mean of its steps but the first."""
    losses: list[float | None]
    """Of each of its steps."""
    peak_bytes: int | None = None


class ScriptEndedError(StepscopeError):
    """The script is no more, and how it ended."""


class ScriptOutOfMemoryError(ScriptEndedError):
    """It asked for more memory than the device had left."""


_OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "STATUS_ALLOC_FAILED")

Message = TypeVar("Message", Ready, Taken)


class TrialProcess:
    """A run of the script, with some settings changed or none."""

    def __init__(
        self, order: Order, settings: dict[str, str], alive: Callable[[], None] = lambda: None
    ) -> None:
        self.losses: list[float | None] = []
        self.peak_bytes: int | None = None
        self._alive = alive
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._mark = new_tag()
        self._channel, theirs = socket.socketpair()
        order = msgspec.structs.replace(order, channel=theirs.fileno(), settings=settings)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "stepscope.advisor.scope.launch",
                "",
                msgspec.json.encode(order),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(theirs.fileno(),),
            process_group=0,
            # A set is walked in the same order by both.
            env=tagged(self._mark) | {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")},
        )
        theirs.close()
        self._begun = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        end_tagged(self._mark)
        self._channel.close()
        self._log.close()

    def ready(self) -> Ready:
        """Waits for the end of its warm-up, and stops it there."""
        found = self._next(Ready)
        self.losses += found.losses
        self._signal(signal.SIGSTOP)
        return found

    def turn(self, steps: int) -> float:
        """Milliseconds of a step, in the mean."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._channel.sendall(f"{steps}\n".encode())
        found = self._next(Taken)
        self._signal(signal.SIGSTOP)
        self.losses += found.losses
        self.peak_bytes = found.peak_bytes
        return found.step_ms

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _next(self, kind: type[Message]) -> Message:
        while b"\n" not in self._begun:
            readable, _, _ = select.select([self._channel], [], [], _LOOK_UP_EVERY_S)
            self._alive()
            chunk = self._channel.recv(1 << 16) if readable else b""
            self._begun += chunk
            if len(self._begun) > _LONGEST_LINE:
                raise ScriptEndedError(
                    f"the run of the script sent a line of more than {_LONGEST_LINE:,} bytes"
                )
            # A process that the script left behind may hold the channel open.
            if not chunk and (readable or self._process.poll() is not None):
                raise self._ended()
        line, _, self._begun = self._begun.partition(b"\n")
        try:
            return from_json(line, kind)
        except msgspec.DecodeError as error:
            raise ScriptEndedError(
                f"the run of the script sent something else than its times: {in_one_line(error)}"
            ) from error

    def _ended(self) -> ScriptEndedError:
        code = self._wait_a_little()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()
        last = f": {_error_of(said)}" if said and code else ""
        if code is not None and code < 0:
            return ScriptEndedError(f"the script was ended by {signal.Signals(-code).name}{last}")
        if not code:
            return ScriptEndedError("the script ended")
        for line in reversed(said[-_LAST_LINES:]):
            if any(words in line for words in _OUT_OF_MEMORY):
                return ScriptOutOfMemoryError(f"the script ran out of memory: {line}")
        return ScriptEndedError(f"the script ended with exit code {code}{last}")

    def _wait_a_little(self) -> int | None:
        deadline = time.monotonic() + 10
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._process.poll()


def _error_of(said: Sequence[str]) -> str:
    """The first line of an exception's words, which may have many; else the last of all."""
    begins = [place for place, line in enumerate(said) if line.startswith(_TRACEBACK)]
    after = said[begins[-1] + 1 :] if begins else ()
    return next((line for line in after if line and not line[0].isspace()), said[-1])
