"""Entry point of a rank's process: what `launch` runs around the given function.

Every failure in it, from the import of the script on, is written to a file that the supervisor
reads, so that an error reaches the caller of `launch` with its message and stack.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Iterator
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import torch

from stepscope.errors import UsageError, one_line
from stepscope.parallel.errors import PeerLost
from stepscope.parallel.heartbeat import HEARTBEAT, Page, State
from stepscope.parallel.main_module import GUARD
from stepscope.parallel.pickling import Received, Result, dumps, why_not
from stepscope.parallel.world import World

_UNTIL_ENDED_S = 5.0
_importing: str | None = None
"""The script that this rank is importing, if any."""


class CannotStart(UsageError):  # noqa: N818
    """The function never ran, for a reason that the caller of `launch` can fix."""


class _Unsendable(Exception):  # noqa: N818
    """The function ran, but its result cannot be sent."""


def refuse_within_import() -> None:
    if _importing is not None:
        raise CannotStart(f"every rank imports {_importing}, which calls launch again", GUARD)


def run_rank(
    task: Received,
    main: dict[str, str],
    folder: str,
    backend: str,
    device: str,
    patience_s: float,
    threads: int,
    supervisor: int,
) -> Result:
    job, rank = Path(folder), int(os.environ["RANK"])
    page = Page(job / "pulses", int(os.environ["WORLD_SIZE"]))
    # Stays open while the process lives: the signal handler writes to it. Only the thread that runs
    # the handler is safe to read; the heartbeat writes the stacks of all threads.
    stack = page.main_stack_file(rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    HEARTBEAT.start(page, rank, supervisor)
    torch.set_num_threads(threads)
    with _reported(job / f"raised-{rank}", connected=False):
        _import_main(main)
        function, arguments = _opened(task)
        world = World.from_environment(backend, device)
        # Inside as well: leaving the group makes the others fail, and this rank must report first.
        with world.connected(patience_s), _reported(job / f"raised-{rank}", connected=True):
            result = Result(_pickled(function(world, *arguments)))
            # Before leaving the group, which makes ranks that wait for this one fail.
            HEARTBEAT.state(State.FINISHED)
    return result


def _import_main(main: dict[str, str]) -> None:
    """Import the script as multiprocessing does, but at a point where errors can be reported."""
    global _importing
    if not main:
        # Functions defined there carry the globals that they use.
        spawn.old_main_modules.append(sys.modules["__main__"])
        sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
        return
    if sys.modules["__main__"].__name__ == "__mp_main__":
        return
    process: Any = multiprocessing.current_process()
    (_importing,) = main.values()
    # With this flag multiprocessing refuses to start processes during the import.
    process._inheriting = True
    try:
        spawn.prepare(main)
    except CannotStart:
        raise
    except (Exception, SystemExit) as error:
        raise CannotStart(
            f"a rank cannot import {_importing}: {one_line(error)}",
            f"if it starts the job, {GUARD}",
        ) from error
    finally:
        del process._inheriting
        _importing = None


def _opened(task: Received) -> tuple[Any, tuple[Any, ...]]:
    try:
        function, arguments = task.open()
    except Exception as error:
        raise CannotStart(
            f"a rank cannot load the function or its arguments: {one_line(error)}",
            "define them in a module that a rank can import, or at the top level of the script",
        ) from error
    return function, arguments


def _pickled(result: Any) -> bytes:
    try:
        return dumps(result, "all")
    except Exception as error:
        raise _Unsendable(why_not(result, "all") or one_line(error)) from error


@contextlib.contextmanager
def _reported(path: Path, *, connected: bool) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        _write_report(path, error, connected=connected)
        HEARTBEAT.state(State.RAISED)
        # The supervisor ends this process. Until then it stays alive, so that only a rank that
        # really died counts as dead.
        time.sleep(_UNTIL_ENDED_S)
        raise


def _in_collective(error: BaseException) -> bool:
    """True if torch.distributed raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "torch/distributed/" in frames[-1].filename


def _write_report(path: Path, error: BaseException, *, connected: bool) -> None:
    """Write atomically what ended this rank and when."""
    what, cause = f"raised {one_line(error)}", error
    if isinstance(error, _Unsendable):
        what = f"finished, but its return value cannot be sent: {error}"
    if isinstance(error, CannotStart) and error.__cause__ is not None:
        cause = error.__cause__
    report = {
        "at_s": time.monotonic(),
        "what": what,
        "cannot_start": str(error) if isinstance(error, CannotStart) else None,
        "connected": connected,
        "in_collective": isinstance(error, PeerLost) or _in_collective(error),
        "stack": "".join(traceback.format_exception(cause)),
    }
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(report))
    unfinished.rename(path)
