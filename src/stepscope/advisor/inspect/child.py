"""A process that is to end as if nobody stood between it and whoever started us."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

_PASSED_ON = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")
    if hasattr(signal, name)
)
_LOOK_EVERY_S = 0.2


class Child:
    """Signals sent to us reach it; those of the terminal reach it by themselves."""

    def __init__(self, command: Sequence[str]) -> None:
        self._waited = {*_PASSED_ON, signal.SIGCHLD}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._waited)
        self.pid = os.posix_spawn(
            command[0], list(command), os.environ, setsigmask=tuple(self._mask)
        )
        self.status: int | None = None

    def wait(self, meanwhile: Callable[[], None]) -> int:
        """Until it has ended: its wait status. `meanwhile` is called several times a second."""
        while self.status is None:
            came = signal.sigtimedwait(self._waited, _LOOK_EVERY_S)
            # A signal of the kernel comes from the terminal, which tells the whole group.
            if came is not None and came.si_signo != signal.SIGCHLD and came.si_code <= 0:
                os.kill(self.pid, came.si_signo)
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.status = status
            meanwhile()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        return self.status


def describe_end(status: int) -> str:
    """How it ended, in words that follow its name."""
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.waitstatus_to_exitcode(status)
    return "ended" if code == 0 else f"ended with exit code {code}"


def end_alike(status: int) -> int:
    """The same exit code; where a signal ended it, the same signal ends us."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(status)
