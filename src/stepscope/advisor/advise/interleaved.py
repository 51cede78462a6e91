"""Controller side of two interleaved (A/B) runs of a script. Does not import torch.

Between its turns a run is stopped (SIGSTOP) with all its processes, so that its data loaders cannot
work ahead while the other run is timed.
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

_POLL_EVERY_S = 0.5
_LONGEST_LINE = 1 << 26
"""In bytes; a turn sends 20 bytes per loss."""
_LAST_LINES = 20
"""Lines searched for an error: torch may print lines of advice after it."""
_TRACEBACK = "Traceback (most recent call last)"


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Message: the warm-up is over."""

    step_ms: float
    """Time of the last warm-up step."""
    losses: list[float | None]
    missing: dict[str, str] = {}
    """Settings that had no effect on the script, with the reason if the script's process knows
    it."""


class TurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """Message: a turn is over."""

    step_ms: float
    """Mean time of its steps, without the first."""
    losses: list[float | None]
    """Loss of each step."""
    peak_bytes: int | None = None


class ScriptEndedError(StepscopeError):
    """The script ended; the message says how."""


class ScriptOutOfMemoryError(ScriptEndedError):
    """The script ran out of device memory."""


_OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "STATUS_ALLOC_FAILED")

Message = TypeVar("Message", Ready, TurnResult)


class TrialProcess:
    """One run of the script, with the given settings changed."""

    def __init__(
        self, order: Order, settings: dict[str, str], alive: Callable[[], None] = lambda: None
    ) -> None:
        self.losses: list[float | None] = []
        self.peak_bytes: int | None = None
        self._alive = alive
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._tag = new_tag()
        self._channel, child_end = socket.socketpair()
        order = msgspec.structs.replace(order, channel=child_end.fileno(), settings=settings)
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
            pass_fds=(child_end.fileno(),),
            process_group=0,
            # Both runs iterate over sets in the same order.
            env=tagged(self._tag) | {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")},
        )
        child_end.close()
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        end_tagged(self._tag)
        self._channel.close()
        self._log.close()

    def ready(self) -> Ready:
        """Wait for the end of the warm-up, then stop the run."""
        message = self._next(Ready)
        self.losses += message.losses
        self._signal(signal.SIGSTOP)
        return message

    def turn(self, steps: int) -> float:
        """Run some steps, then stop the run again; return the mean milliseconds per step."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._channel.sendall(f"{steps}\n".encode())
        message = self._next(TurnResult)
        self._signal(signal.SIGSTOP)
        self.losses += message.losses
        self.peak_bytes = message.peak_bytes
        return message.step_ms

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _next(self, kind: type[Message]) -> Message:
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._channel], [], [], _POLL_EVERY_S)
            self._alive()
            chunk = self._channel.recv(1 << 16) if readable else b""
            self._buffer += chunk
            if len(self._buffer) > _LONGEST_LINE:
                raise ScriptEndedError(
                    f"the script's process sent a line of more than {_LONGEST_LINE:,} bytes"
                )
            # A process left behind by the script may keep the channel open.
            if not chunk and (readable or self._process.poll() is not None):
                raise self._ended()
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return from_json(line, kind)
        except msgspec.DecodeError as error:
            raise ScriptEndedError(
                f"the script's process sent an invalid message: {in_one_line(error)}"
            ) from error

    def _ended(self) -> ScriptEndedError:
        code = self._wait_briefly()
        self._log.seek(0)
        output = self._log.read().decode(errors="replace").strip().splitlines()
        last = f": {_error_of(output)}" if output and code else ""
        if code is not None and code < 0:
            return ScriptEndedError(f"the script was ended by {signal.Signals(-code).name}{last}")
        if not code:
            return ScriptEndedError("the script ended")
        for line in reversed(output[-_LAST_LINES:]):
            if any(words in line for words in _OUT_OF_MEMORY):
                return ScriptOutOfMemoryError(f"the script ran out of memory: {line}")
        return ScriptEndedError(f"the script ended with exit code {code}{last}")

    def _wait_briefly(self) -> int | None:
        deadline = time.monotonic() + 10
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._process.poll()


def _error_of(output: Sequence[str]) -> str:
    """Return the first line of the last exception's message, or else the last line of output."""
    starts = [index for index, line in enumerate(output) if line.startswith(_TRACEBACK)]
    after = output[starts[-1] + 1 :] if starts else ()
    return next((line for line in after if line and not line[0].isspace()), output[-1])
