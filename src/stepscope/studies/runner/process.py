"""A worker seen from the runner: start it, ask it, notice how it ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from stepscope.errors import StepscopeError, UsageError, in_one_line
from stepscope.records.schema import Ceiling
from stepscope.studies.runner import protocol
from stepscope.studies.runner.descendants import WORKER, end_tagged, new_tag, tagged
from stepscope.studies.runner.nursery import Forked, Nursery
from stepscope.studies.runner.protocol import (
    Ceilings,
    Checked,
    Dismissed,
    Failed,
    Measured,
    Progress,
    Ready,
    Reply,
    Request,
)

START_TIMEOUT_S = 180.0
CEILINGS_TIMEOUT_S = 600.0
FAREWELL_TIMEOUT_S = 90.0
LONGEST_LINE = 1 << 28
"""Bytes of a reply; the largest one so far, a profile of 48 layers, has 3 MB."""
_LOOK_UP_EVERY_S = 0.5
"""A signal that arrives just before a wait does not end it, and is seen only after it."""


class Lines:
    """Lines from a pipe, read by whoever waits for them.

    Neither a thread nor a lock: an interrupt that arrives inside of `queue.Queue.get` may leave its
    lock taken, or let go of twice.
    """

    def __init__(self, pipe: int, longest: int = LONGEST_LINE) -> None:
        self._pipe = pipe
        self._longest = longest
        self._whole: deque[bytes] = deque()
        self._begun = bytearray()

    def next(self, deadline: float) -> bytes:
        """The next line; TimeoutError after the deadline, EOFError where there is none any more,
        OverflowError where one does not end."""
        while not self._whole:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._pipe], [], [], min(max(0.0, left), _LOOK_UP_EVERY_S))
            if ready:
                self._take(os.read(self._pipe, 1 << 16))
            elif left <= 0:
                raise TimeoutError
            if len(self._begun) > self._longest:
                raise OverflowError
        return self._whole.popleft()

    def _take(self, chunk: bytes) -> None:
        if not chunk:
            raise EOFError
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            self._whole.append(bytes(self._begun) + line)
            self._begun.clear()
        self._begun += rest


class WorkerProcess:
    """One worker process and the conversation with it."""

    def __init__(self, device: str, nursery: Nursery | None = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        theirs, ours = os.pipe()
        self._requests = os.fdopen(ours, "wb")
        self._reply_pipe, their_replies = os.pipe()
        self._replies = Lines(self._reply_pipe)
        files = (theirs, their_replies, self._errors.fileno())
        self._process: subprocess.Popen[bytes] | Forked
        self._mark = nursery.mark if nursery else new_tag()
        self._spared = {nursery.pid} if nursery else set()
        try:
            self._process = (
                nursery.start(files) if nursery else _own_process(device, files, self._mark)
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(theirs)
            os.close(their_replies)
        try:
            ready = self._greeting(time.monotonic() + START_TIMEOUT_S)
            if isinstance(ready, Failed) and ready.usage:
                raise UsageError(ready.reason)
            if not isinstance(ready, Ready):
                reason = ready.reason if isinstance(ready, Failed) else "it did not greet"
                raise StepscopeError(f"the worker did not start: {reason}")
        except BaseException:
            self.stop()
            raise
        self.environment = ready.environment
        self.lacks = ready.lacks

    def _greeting(self, deadline: float) -> Reply:
        """The first reply. What a library prints while the interpreter starts comes before it."""
        while isinstance(reply := self._next(deadline), Failed) and reply.noise:
            pass
        return reply

    def _next(self, deadline: float) -> Reply:
        """The next reply; a death or a missed deadline reads as a failure."""
        try:
            line = self._replies.next(deadline)
        except TimeoutError:
            return Failed("timeout", "no answer in time")
        except EOFError:
            return Failed("error", self._epitaph())
        except OverflowError:
            return Failed("error", f"the worker sent a line of more than {LONGEST_LINE:,} bytes")
        try:
            return protocol.decode_reply(line)
        except msgspec.DecodeError as error:
            why = in_one_line(error)
            if isinstance(error, msgspec.ValidationError) and b"null" in line:
                # JSON has no NaN and no infinity: they arrive as null.
                return Failed("error", f"the measurement is not made of finite numbers: {why}")
            return Failed("error", f"the worker sent {_beginning(line)}: {why}", noise=True)

    def _epitaph(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "the worker was killed by SIGKILL; the host may have run out of memory"
        if code < 0:
            return f"the worker died of {signal.Signals(-code).name}"
        return f"the worker ended with exit code {code}: {self._last_words()}"

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _ask(
        self, request: Request, timeout_s: float, progress: Callable[[Progress], None]
    ) -> Ceilings | Measured | Checked | Dismissed | Failed:
        deadline = time.monotonic() + timeout_s
        try:
            self._requests.write(protocol.encode(request) + b"\n")
            self._requests.flush()
        except BrokenPipeError:
            return Failed("error", self._epitaph())
        while True:
            reply = self._next(deadline)
            if isinstance(reply, Progress):
                progress(reply)
            elif not isinstance(reply, Ready):
                return reply

    def measure(
        self,
        study: str,
        config: dict[str, object],
        timeout_s: float,
        progress: Callable[[Progress], None],
    ) -> Measured | Failed:
        reply = self._ask(protocol.MeasureCase(study, config), timeout_s, progress)
        if isinstance(reply, Failed) and reply.status == "timeout":
            return Failed("timeout", f"not done after {timeout_s:g} s (--timeout)")
        if isinstance(reply, Measured | Failed):
            return reply
        return Failed("error", f"the worker answered with {type(reply).__name__}, not a result")

    def ceilings(self, progress: Callable[[Progress], None], *, again: bool) -> tuple[Ceiling, ...]:
        reply = self._ask(protocol.MeasureCeilings(again), CEILINGS_TIMEOUT_S, progress)
        if isinstance(reply, Ceilings):
            return reply.ceilings
        why = reply.reason if isinstance(reply, Failed) else f"the answer is {type(reply).__name__}"
        raise StepscopeError(f"this machine's ceilings could not be measured: {why}")

    def check_model(self, name: str, timeout_s: float) -> None:
        """Raise UsageError where the model of that name cannot be built."""
        reply = self._ask(protocol.CheckModel(name), timeout_s, lambda _: None)
        if isinstance(reply, Failed):
            raise (UsageError if reply.usage else StepscopeError)(reply.reason)

    def dismiss_followers(self) -> None:
        self._ask(protocol.DismissFollowers(), FAREWELL_TIMEOUT_S, lambda _: None)

    def stop(self) -> None:
        """End the worker and whatever it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # Those that left its group, and those of a worker that died by itself.
        end_tagged(self._mark, self._spared)
        self._close()

    def _close(self) -> None:
        for stream in (self._requests, self._errors):
            with contextlib.suppress(OSError):
                stream.close()
        if self._reply_pipe >= 0:
            os.close(self._reply_pipe)
            self._reply_pipe = -1


def _beginning(line: bytes) -> str:
    """As much of a line as shows where it comes from."""
    return ascii(line[:60].decode(errors="replace")) + ("…" if len(line) > 60 else "")


def _own_process(device: str, files: Sequence[int], mark: str) -> subprocess.Popen[bytes]:
    stdin, stdout, stderr = files
    # A session of its own: Ctrl-C reaches the runner alone, which then decides.
    return subprocess.Popen(
        [sys.executable, "-m", "stepscope.studies.runner.worker", device],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        env=tagged(mark) | {WORKER: mark},
    )
