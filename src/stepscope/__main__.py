"""Entry point of `stepscope` and `python -m stepscope`."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the current folder first on the path; nothing is imported from there.
    del sys.path[0]

import atexit
import os
import signal
from types import FrameType

_INTERRUPTED = 130


def main() -> int:
    """Run the command line. A signal ends the program with the documented exit code at any moment:
    before the command starts and after it returns there is nothing to save."""
    _on_signals(_exit_interrupted)
    # Runs after all other functions of `atexit`. The interpreter then restores the default action,
    # which would end the process by the signal.
    atexit.register(_on_signals, signal.SIG_IGN)
    from stepscope.cli import main as command

    try:
        code = command()
        _on_signals(_exit_interrupted)
    except KeyboardInterrupt:
        # A second signal while the first was handled.
        os._exit(_INTERRUPTED)
    return code


def _on_signals(handler: object) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        # The parent process may have set one of them to be ignored, as nohup does.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)  # type: ignore[arg-type]


def _exit_interrupted(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
