"""Detect the end of a training step from optimizer steps alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Hashable

_CLEARLY = 1.25
"""Ratio below which two periods count as equal."""


class _Seen:
    def __init__(self, index: int, first: int) -> None:
        self.index = index
        self.first = self.last = first
        self.count = 0

    @property
    def period(self) -> float | None:
        """Mean number of steps of any optimizer between two of its own."""
        return (self.last - self.first) / (self.count - 1) if self.count > 1 else None


class Anchor:
    """Decides which of a program's optimizer steps ends a training step.

    With several optimizers a training step is one full iteration of the loop: it ends with the
    optimizer that steps least often, and among equals with the one that came last in the first
    iteration. It is known after two iterations, and fixed by `freeze`.
    """

    def __init__(self) -> None:
        self.steps = 0
        """Steps of all optimizers so far."""
        self._seen: dict[Hashable, _Seen] = {}
        self._anchor: Hashable | None = None
        self._frozen = False

    @property
    def optimizers(self) -> int:
        return len(self._seen)

    def freeze(self) -> None:
        self._frozen = True

    def ends_step(self, optimizer: Hashable) -> bool:
        self.steps += 1
        seen = self._seen.setdefault(optimizer, _Seen(len(self._seen), self.steps))
        seen.last = self.steps
        seen.count += 1
        if self._anchor is None or (
            not self._frozen and self._is_better(seen, self._seen[self._anchor])
        ):
            self._anchor = optimizer
        return optimizer == self._anchor

    @staticmethod
    def _is_better(new: _Seen, current: _Seen) -> bool:
        if new.period is None or current.period is None:
            return new.period is not None
        if new.index > current.index:
            return new.period * _CLEARLY > current.period
        return new.period > current.period * _CLEARLY
