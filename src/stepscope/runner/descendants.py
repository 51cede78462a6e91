"""End all processes that a worker or a script started, identified by a mark in their environment.

A process group ends with one signal, but a child that starts its own session or group is not part
of it, and a child whose parent has ended is no longer in its process tree. All of them keep the
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
"""The environment variable with the mark of a worker's processes."""
_PREFIX = "STEPSCOPE_STARTED_"
_PROCESSES = Path("/proc")
_MAX_ROUNDS = 20
"""Rounds of killing: a process may start another one while it is being killed."""


def new_tag() -> str:
    return secrets.token_hex(8)


def tagged(mark: str) -> dict[str, str]:
    """This process's environment with the mark added to existing ones."""
    return os.environ | {f"{_PREFIX}{mark}": "1"}


def end_tagged(mark: str, spare: Collection[int] = ()) -> None:
    """Kill every process that was started with this mark. Needs /proc: without it no process is
    matched, and ending the process group has to suffice."""
    for _ in range(_MAX_ROUNDS):
        processes = [process for process in _started_with(mark) if process not in spare]
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if not processes:
            return


def _started_with(mark: str) -> Iterator[int]:
    wanted = f"{_PREFIX}{mark}=1".encode()
    for folder in _PROCESSES.glob("[0-9]*"):
        # A process that has ended and was not waited for has an empty environment.
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
