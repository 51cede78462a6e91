"""Time that this process waited for a CPU core."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")


def seconds_without_a_core() -> float | None:
    """Seconds that all threads together were runnable without a free core; None if the kernel does
    not count them."""
    waited: list[int] = []
    with suppress(OSError):
        for thread in _THREADS.iterdir():
            # A thread may end between listing and reading.
            with suppress(OSError, IndexError, ValueError):
                waited.append(int((thread / "schedstat").read_text().split()[1]))
    return sum(waited) / 1e9 if waited else None
