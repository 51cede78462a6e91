"""Memory over the course of a step, in a bounded number of points that preserve the peaks."""

from __future__ import annotations

from collections.abc import Mapping

from stepscope.records.memory import Point

MAX_POINTS = 160


class MemoryTimeline:
    """One point per operator; when there are too many, the higher of two neighbors is kept."""

    def __init__(self, most: int = MAX_POINTS) -> None:
        self._most = most
        self._every = 1
        self._seen = 0
        self._entries: list[tuple[str, int, int, dict[str, int]]] = []
        """Phase, operator number, total bytes, bytes by kind."""

    def add(self, phase: str, kinds: Mapping[str, int]) -> None:
        self._seen += 1
        total = sum(kinds.values())
        last = self._entries[-1] if self._entries else None
        same_bin = (
            last is not None
            and last[0] == phase
            and (last[1] - 1) // self._every == (self._seen - 1) // self._every
        )
        if same_bin:
            assert last is not None
            if total > last[2]:
                self._entries[-1] = (phase, self._seen, total, dict(kinds))
            return
        self._entries.append((phase, self._seen, total, dict(kinds)))
        if len(self._entries) > 2 * self._most:
            self._halve()

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
        merged: list[tuple[str, int, int, dict[str, int]]] = []
        for each in self._entries:
            if (
                merged
                and merged[-1][0] == each[0]
                and (merged[-1][1] - 1) // self._every == (each[1] - 1) // self._every
            ):
                if each[2] > merged[-1][2]:
                    merged[-1] = each
            else:
                merged.append(each)
        self._entries = merged
