"""Detection of profilers that the observed program uses itself.

A process can run one profiler. A second one silently ends the first, and ending the first then
crashes the process. So Stepscope's profiler never starts while another is prepared, and stops when
another is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import profiler


class OtherProfilers:
    """Counts the program's profilers between their preparation and their end."""

    def __init__(self, give_way: Callable[[], None]) -> None:
        self._give_way = give_way
        self._prepared: set[int] = set()
        self._ours = False

    @property
    def busy(self) -> bool:
        return bool(self._prepared) or bool(profiler._is_profiler_enabled)

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Context in which Stepscope starts or stops its own profiler."""
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        kind: Any = profiler.profile
        prepare, leave = kind._prepare_trace, kind.__exit__

        def prepare_first(one: Any, *arguments: Any, **keywords: Any) -> Any:
            if not self._ours:
                self._prepared.add(id(one))
                self._give_way()
            return prepare(one, *arguments, **keywords)

        def leave_first(one: Any, *arguments: Any, **keywords: Any) -> Any:
            self._prepared.discard(id(one))
            return leave(one, *arguments, **keywords)

        kind._prepare_trace, kind.__exit__ = prepare_first, leave_first
        try:
            yield
        finally:
            kind._prepare_trace, kind.__exit__ = prepare, leave
