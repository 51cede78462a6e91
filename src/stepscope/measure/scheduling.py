"""Whether this process had the cores that it asked for."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")


def seconds_without_a_core() -> float | None:
    """Of all threads together, so far: ready to run, and no core was free. None where the kernel
    does not count it."""
    waited: list[int] = []
    with suppress(OSError):
        for thread in _THREADS.iterdir():
            # A thread may end meanwhile.
            with suppress(OSError, IndexError, ValueError):
                waited.append(int((thread / "schedstat").read_text().split()[1]))
    return sum(waited) / 1e9 if waited else None
