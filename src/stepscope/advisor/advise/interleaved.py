"""Controller side of two interleaved (A/B) runs of a script. Does not import torch.

Between its turns a run is stopped (SIGSTOP) with all its processes, so that its data loaders cannot
work ahead while the other run is timed. A run of several ranks has a channel to each: all of them
have the same turns, and a step takes as long as on the slowest.
"""

from __future__ import annotations

import contextlib
import math
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
from stepscope.processes import rank_environments, script_command, signal_name
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
Number = TypeVar("Number", int, float)


class _Process:
    """One process of a run: the only one, or a rank."""

    def __init__(self, order: Order, environment: dict[str, str], group: int) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.channel, child_end = socket.socketpair()
        order = msgspec.structs.replace(order, channel=child_end.fileno())
        self._process = subprocess.Popen(
            script_command("", msgspec.json.encode(order).decode()),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(child_end.fileno(),),
            process_group=group,
            env=environment,
        )
        self.pid = self._process.pid
        child_end.close()
        self._buffer = bytearray()

    def close(self) -> None:
        self._process.wait()
        self.channel.close()
        self._log.close()

    @property
    def has_line(self) -> bool:
        return b"\n" in self._buffer

    def receive(self, readable: bool) -> None:
        """Receive a part of a line, if there is one."""
        chunk = self.channel.recv(1 << 16) if readable else b""
        self._buffer += chunk
        if len(self._buffer) > _LONGEST_LINE:
            raise ScriptEndedError(
                f"the script's process sent a line of more than {_LONGEST_LINE:,} bytes"
            )
        # A process left behind by the script may keep the channel open.
        if not chunk and (readable or self._process.poll() is not None):
            raise self._ended()

    def message(self, kind: type[Message]) -> Message:
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


class TrialProcess:
    """One run of the script, in one process or in several ranks, with the given settings
    changed."""

    def __init__(
        self, order: Order, settings: dict[str, str], alive: Callable[[], None] = lambda: None
    ) -> None:
        self.losses: list[float | None] = []
        self.peak_bytes: int | None = None
        self.started, self.settings = settings, settings
        """Settings with which the process was started, and those that it has now."""
        self._first: Ready | None = None
        self._alive = alive
        self._tag = new_tag()
        # Both runs iterate over sets in the same order.
        hashes = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
        order = msgspec.structs.replace(order, settings=settings)
        self._ranks: list[_Process] = []
        for own in rank_environments(order.ranks):
            environment = tagged(self._tag) | hashes | own
            self._ranks.append(_Process(order, environment, self._group))

    @property
    def _group(self) -> int:
        """The process group of all ranks: that of the first one."""
        return self._ranks[0].pid if self._ranks else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.send_signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.close()
        end_tagged(self._tag)

    def ready(self) -> Ready:
        """Wait for the end of the warm-up, then stop the run."""
        if self._first is None:
            self._first = _ready(self._next(Ready))
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
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.channel.sendall(msgspec.json.encode(turn) + b"\n")
        message = _result(self._next(TurnResult))
        self.send_signal(signal.SIGSTOP)
        self.losses += message.losses
        self.peak_bytes = message.peak_bytes
        return message

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, number)

    def _next(self, kind: type[Message]) -> list[Message]:
        """Wait for the next message of every rank."""
        while waiting := [rank for rank in self._ranks if not rank.has_line]:
            channels = [rank.channel for rank in waiting]
            readable, _, _ = select.select(channels, [], [], _POLL_EVERY_S)
            self._alive()
            for rank in waiting:
                rank.receive(rank.channel in readable)
        return [rank.message(kind) for rank in self._ranks]


def _ready(ranks: Sequence[Ready]) -> Ready:
    """Combine the messages of all ranks: a setting had an effect if it had one on any of them."""
    first, *others = ranks
    return msgspec.structs.replace(
        first,
        step_ms=max(one.step_ms for one in ranks),
        losses=_mean_losses([one.losses for one in ranks]),
        missing={
            name: why
            for name, why in first.missing.items()
            if all(name in one.missing for one in others)
        },
        switchable=[
            name for name in first.switchable if all(name in one.switchable for one in others)
        ],
    )


def _result(ranks: Sequence[TurnResult]) -> TurnResult:
    """Combine the messages of all ranks: the mean of the losses, the largest of what they took."""
    return TurnResult(
        step_ms=max(one.step_ms for one in ranks),
        losses=_mean_losses([one.losses for one in ranks]),
        peak_bytes=_largest([one.peak_bytes for one in ranks]),
        cpu_ms=max(one.cpu_ms for one in ranks),
        instructions=_largest([one.instructions for one in ranks]),
    )


def _mean_losses(ranks: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Losses of the job: none in a step in which a rank has none."""
    return [
        None if None in losses else math.fsum(x for x in losses if x is not None) / len(losses)
        for losses in zip(*ranks, strict=False)
    ]


def _largest(values: Sequence[Number | None]) -> Number | None:
    return max((one for one in values if one is not None), default=None)


def _error_of(output: Sequence[str]) -> str:
    """Return the first line of the last exception's message, or else the last line of output."""
    starts = [index for index, line in enumerate(output) if line.startswith(_TRACEBACK)]
    after = output[starts[-1] + 1 :] if starts else ()
    return next((line for line in after if line and not line[0].isspace()), output[-1])
