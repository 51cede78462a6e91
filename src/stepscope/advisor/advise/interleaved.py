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
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import msgspec

from stepscope.advisor.inspect.order import Order
from stepscope.errors import StepscopeError, in_one_line, tells_of_memory
from stepscope.processes import script_command, signal_name
from stepscope.records.decoding import from_json
from stepscope.runner.descendants import end_tagged, new_tag, tagged

_POLL_EVERY_S = 0.5
_LONGEST_LINE = 1 << 26
"""In bytes; a turn sends 20 bytes per loss."""
_LAST_LINES = 20
"""Lines searched for an error: torch may print lines of advice after it."""
_TRACEBACK = "Traceback (most recent call last)"
UNTIMED = 1
"""Untimed steps at the start of a turn: the first starts on an idle device."""
_AFTER_SWITCH = 2
"""Untimed steps after settings were switched."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Message: run some steps; none of them ends the run."""

    steps: int
    """Timed steps."""
    untimed: int = UNTIMED
    """Steps before these."""
    settings: dict[str, str] | None = None
    """Settings from now on, if they change."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Message: the warm-up is over."""

    step_ms: float
    """Time of the last warm-up step."""
    losses: list[float | None]
    missing: dict[str, str] = {}
    """Settings that had no effect on the script, with the reason if the script's process knows
    it."""
    switchable: list[str] = []
    """Settings that this process can take back and make again."""


class TurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """Message: a turn is over."""

    step_ms: float
    """Mean time of its timed steps."""
    losses: list[float | None]
    """Loss of each step."""
    peak_bytes: int | None = None
    cpu_ms: float = 0.0
    """Mean CPU time of its timed steps, of all threads of the process."""
    instructions: float | None = None
    """Mean number of instructions of its timed steps; None if the machine does not count them."""


class ScriptEndedError(StepscopeError):
    """The script ended; the message says how."""


class ScriptFinishedError(ScriptEndedError):
    """The script ended as intended, after its last step."""


class ScriptOutOfMemoryError(ScriptEndedError):
    """The script ran out of device memory."""


Message = TypeVar("Message", Ready, TurnResult)


class TrialProcess:
    """One run of the script, with the given settings changed."""

    def __init__(
        self, order: Order, settings: dict[str, str], alive: Callable[[], None] = lambda: None
    ) -> None:
        self.losses: list[float | None] = []
        self.peak_bytes: int | None = None
        self.started, self.settings = settings, settings
        """Settings with which the process was started, and those that it has now."""
        self._first: Ready | None = None
        self._alive = alive
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._tag = new_tag()
        self._channel, child_end = socket.socketpair()
        order = msgspec.structs.replace(order, channel=child_end.fileno(), settings=settings)
        self._process = subprocess.Popen(
            script_command("", msgspec.json.encode(order).decode()),
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
        if self._first is None:
            self._first = self._next(Ready)
            self.losses += self._first.losses
            self.send_signal(signal.SIGSTOP)
        return self._first

    @property
    def is_switched(self) -> bool:
        """Whether it has other settings than those with which it was started."""
        return self.settings != self.started

    def can_switch(self, settings: dict[str, str]) -> bool:
        """Return True if a process that runs can have these settings: all that it lacks of those
        with which it was started can be taken back."""
        if self._first is None or self._first.missing:
            return False
        lacking = self.started.keys() - settings.keys()
        return settings.items() <= self.started.items() and lacking <= {*self._first.switchable}

    def switch(self, settings: dict[str, str]) -> None:
        """Change the settings; the next turn begins with steps that are not timed."""
        if settings != self.settings:
            self._send(Turn(steps=0, untimed=_AFTER_SWITCH, settings=settings))
            self.settings = settings

    def turn(self, steps: int, untimed: int = UNTIMED) -> TurnResult:
        """Run some steps, then stop the run again."""
        return self._send(Turn(steps=steps, untimed=untimed))

    def _send(self, turn: Turn) -> TurnResult:
        self.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._channel.sendall(msgspec.json.encode(turn) + b"\n")
        message = self._next(TurnResult)
        self.send_signal(signal.SIGSTOP)
        self.losses += message.losses
        self.peak_bytes = message.peak_bytes
        return message

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
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
            return ScriptEndedError(f"the script was ended by {signal_name(-code)}{last}")
        if not code:
            return ScriptFinishedError("the script ended")
        for line in reversed(output[-_LAST_LINES:]):
            if tells_of_memory(line):
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
