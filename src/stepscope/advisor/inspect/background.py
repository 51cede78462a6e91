"""Low-priority background work that does not slow down the observed program."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """Runs a function in a thread that is scheduled only on otherwise idle cores (SCHED_IDLE)."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._waited_for = False
        self._policy = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> Result:
        """Raise the thread to normal priority, wait for it and return its result."""
        with self._policy:
            self._waited_for = True
            if self._thread.native_id is not None and self._thread.is_alive():
                _set_policy(self._thread.native_id, "SCHED_OTHER")
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        with self._policy:
            if not self._waited_for:
                _set_policy(threading.get_native_id(), "SCHED_IDLE")
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._error = error


def _set_policy(thread: int, name: str) -> None:
    """Set the scheduling policy of a thread and of threads it starts; these policies are
    Linux-only."""
    if hasattr(os, name):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, getattr(os, name), os.sched_param(0))
