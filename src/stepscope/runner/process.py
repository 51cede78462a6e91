"""The runner's handle of a worker: start it, send requests, detect how it ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from stepscope.errors import StepscopeError, UsageError, in_one_line
from stepscope.processes import own_command, signal_name
from stepscope.records.schema import Ceiling
from stepscope.runner import protocol
from stepscope.runner.descendants import WORKER, end_tagged, new_tag, tagged
from stepscope.runner.nursery import Forked, Nursery
from stepscope.runner.protocol import (
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
"""Longest reply in bytes; the largest so far, a profile of 48 layers, has 3 MB."""
_LOOK_UP_EVERY_S = 0.5
"""Longest wait at once: a signal just before a wait does not end it, and is handled after it."""


class Lines:
    """Lines from a pipe, read by the caller that waits for them.

    Uses neither a thread nor a lock: an interrupt inside `queue.Queue.get` may leave its lock
    acquired, or release it twice.
    """

    def __init__(self, pipe: int, longest: int = LONGEST_LINE) -> None:
        self._pipe = pipe
        self._longest = longest
        self._whole: deque[bytes] = deque()
        self._begun = bytearray()

    def next(self, deadline: float) -> bytes:
        """The next line; TimeoutError after the deadline, EOFError at the end of the pipe,
        OverflowError if a line does not end."""
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
        *complete, rest = chunk.split(b"\n")
        for line in complete:
            self._whole.append(bytes(self._begun) + line)
            self._begun.clear()
        self._begun += rest


class WorkerProcess:
    """One worker process and the communication with it."""

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
                reason = ready.reason if isinstance(ready, Failed) else "it sent no greeting"
                raise StepscopeError(f"the worker did not start: {reason}")
        except BaseException:
            self.stop()
            raise
        self.environment = ready.environment
        self.lacks = ready.lacks

    def _greeting(self, deadline: float) -> Reply:
        """The first reply. Output of libraries at interpreter start is skipped."""
        while isinstance(reply := self._next(deadline), Failed) and reply.noise:
            pass
        return reply

    def _next(self, deadline: float) -> Reply:
        """The next reply; a death or a missed deadline becomes a failure."""
        try:
            line = self._replies.next(deadline)
        except TimeoutError:
            return Failed("timeout", "no reply in time")
        except EOFError:
            return Failed("error", self._exit_reason())
        except OverflowError:
            return Failed("error", f"the worker sent a line of more than {LONGEST_LINE:,} bytes")
        try:
            return protocol.decode_reply(line)
        except msgspec.DecodeError as error:
            why = in_one_line(error)
            if isinstance(error, msgspec.ValidationError) and b"null" in line:
                # JSON has no NaN and no infinity: they arrive as null.
                return Failed("error", f"the measurement has numbers that are not finite: {why}")
            return Failed("error", f"the worker sent {_beginning(line)}: {why}", noise=True)

    def _exit_reason(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "the worker was killed by SIGKILL; the host may have run out of memory"
        if code < 0:
            return f"the worker died of {signal_name(-code)}"
        return f"the worker ended with exit code {code}: {self._last_error_line()}"

    def _last_error_line(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    def _ask(
        self, request: Request, timeout_s: float, progress: Callable[[Progress], None]
    ) -> Ceilings | Measured | Checked | Dismissed | Failed:
        deadline = time.monotonic() + timeout_s
        try:
            self._requests.write(protocol.encode(request) + b"\n")
            self._requests.flush()
        except BrokenPipeError:
            return Failed("error", self._exit_reason())
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
        return Failed("error", f"the worker replied with {type(reply).__name__}, not a result")

    def ceilings(self, progress: Callable[[Progress], None], *, again: bool) -> tuple[Ceiling, ...]:
        reply = self._ask(protocol.MeasureCeilings(again), CEILINGS_TIMEOUT_S, progress)
        if isinstance(reply, Ceilings):
            return reply.ceilings
        why = reply.reason if isinstance(reply, Failed) else f"the reply is {type(reply).__name__}"
        raise StepscopeError(f"this machine's ceilings could not be measured: {why}")

    def check_model(self, name: str, timeout_s: float) -> None:
        """Raise UsageError if the model of that name cannot be built."""
        reply = self._ask(protocol.CheckModel(name), timeout_s, lambda _: None)
        if isinstance(reply, Failed):
            raise (UsageError if reply.usage else StepscopeError)(reply.reason)

    def dismiss_followers(self) -> None:
        self._ask(protocol.DismissFollowers(), FAREWELL_TIMEOUT_S, lambda _: None)

    def stop(self) -> None:
        """End the worker and all processes that it started, immediately."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # Those that left its group, and those of a worker that died on its own.
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
    """The beginning of a line, enough to see where it comes from."""
    return ascii(line[:60].decode(errors="replace")) + ("…" if len(line) > 60 else "")


def _own_process(device: str, files: Sequence[int], mark: str) -> subprocess.Popen[bytes]:
    stdin, stdout, stderr = files
    # A separate session: Ctrl-C reaches only the runner, which then decides.
    return subprocess.Popen(
        own_command("stepscope.runner.worker", device),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        env=tagged(mark) | {WORKER: mark},
    )
