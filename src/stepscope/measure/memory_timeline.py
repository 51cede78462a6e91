"""Memory over the course of a step, in a bounded number of points that preserve the peaks."""

from __future__ import annotations

from collections.abc import Mapping

from stepscope.records.memory import Point

MAX_POINTS = 160
_Entry = tuple[str, int, int, dict[str, int]]
"""Phase, operator number, total bytes, bytes by kind."""


class MemoryTimeline:
    """One point per operator; when there are too many, the higher of two neighbors is kept."""

    def __init__(self, most: int = MAX_POINTS) -> None:
        self._most = most
        self._every = 1
        self._seen = 0
        self._entries: list[_Entry] = []

    def add(self, phase: str, kinds: Mapping[str, int]) -> None:
        self._seen += 1
        self._merge((phase, self._seen, sum(kinds.values()), dict(kinds)))
        if len(self._entries) > 2 * self._most:
            self._halve()

    def _merge(self, entry: _Entry) -> None:
        """Add an entry, of which only the higher is kept in a bin of operators of one phase."""
        last = self._entries[-1] if self._entries else None
        if (
            last is None
            or last[0] != entry[0]
            or (last[1] - 1) // self._every != (entry[1] - 1) // self._every
        ):
            self._entries.append(entry)
        elif entry[2] > last[2]:
            self._entries[-1] = entry

    def points(self) -> tuple[Point, ...]:
        while len(self._entries) > self._most:
            before = len(self._entries)
            self._halve()
            if len(self._entries) == before:
                break
        return tuple(
            Point(
                phase=phase,
                operator=operator,
                kinds={kind: size for kind, size in kinds.items() if size},
            )
            for phase, operator, _, kinds in self._entries
        )

    def _halve(self) -> None:
        self._every *= 2
        entries, self._entries = self._entries, []
        for entry in entries:
            self._merge(entry)
