"""Processes that a worker or a script started, wherever they went: found by a mark.

A process group ends with one signal, but a child that starts a session or a group of its own is
not in it, and one whose parent has ended is nobody's child. What all of them keep is the
environment that they were started with.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

WORKER = "STEPSCOPE_WORKER"
"""The variable with the mark of a worker's processes."""
_PREFIX = "STEPSCOPE_STARTED_"
_PROCESSES = Path("/proc")
_MOST_ROUNDS = 20
"""A process may start another one while it is being ended."""


def new_tag() -> str:
    return secrets.token_hex(8)


def tagged(mark: str) -> dict[str, str]:
    """This process's environment with a mark added to those that it may have."""
    return os.environ | {f"{_PREFIX}{mark}": "1"}


def end_tagged(mark: str, spare: Collection[int] = ()) -> None:
    """Kill every process that was started with this mark. Needs /proc: elsewhere nothing is found,
    and ending the process group has to do."""
    for _ in range(_MOST_ROUNDS):
        found = [process for process in _started_with(mark) if process not in spare]
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if not found:
            return


def _started_with(mark: str) -> Iterator[int]:
    wanted = f"{_PREFIX}{mark}=1".encode()
    for folder in _PROCESSES.glob("[0-9]*"):
        # Of a process that has ended and was not waited for, the environment is empty.
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
