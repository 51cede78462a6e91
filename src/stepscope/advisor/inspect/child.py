"""Child process whose signals and exit status are passed through transparently."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

from stepscope.processes import signal_name

_FORWARDED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")
    if hasattr(signal, name)
)
_POLL_EVERY_S = 0.2


class Child:
    """Child process that receives the signals sent to this process; signals of the terminal reach
    the process group anyway."""

    def __init__(self, command: Sequence[str]) -> None:
        self._waited = {*_FORWARDED, signal.SIGCHLD}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._waited)
        self.pid = os.posix_spawn(
            command[0], list(command), os.environ, setsigmask=tuple(self._mask)
        )
        self.status: int | None = None

    def wait(self, meanwhile: Callable[[], None]) -> int:
        """Wait for its end and return its wait status; call `meanwhile` several times a second."""
        while self.status is None:
            received = signal.sigtimedwait(self._waited, _POLL_EVERY_S)
            # A signal with si_code > 0 comes from the terminal, which signals the entire group.
            if (
                received is not None
                and received.si_signo != signal.SIGCHLD
                and received.si_code <= 0
            ):
                os.kill(self.pid, received.si_signo)
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.status = status
            meanwhile()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        return self.status


def describe_end(status: int) -> str:
    """Describe how it ended, as a predicate after its name."""
    if os.WIFSIGNALED(status):
        return f"was ended by {signal_name(os.WTERMSIG(status))}"
    code = os.waitstatus_to_exitcode(status)
    return "ended" if code == 0 else f"ended with exit code {code}"


def end_alike(status: int) -> int:
    """Return the same exit code; if a signal ended the child, end this process by the same
    signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        sys.stdout.flush()
        sys.stderr.flush()
        if number != signal.SIGKILL:  # Its action cannot be set.
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(status)
