"""Where the step of a training loop ends, told from its optimizers' calls alone. No torch here."""

from __future__ import annotations

from collections.abc import Hashable

_CLEARLY = 1.25
"""Periods that differ by less are taken as equal."""


class _Seen:
    def __init__(self, place: int, first: int) -> None:
        self.place = place
        self.first = self.last = first
        self.count = 0

    @property
    def period(self) -> float | None:
        """Optimizer steps of any kind from one of its own to the next, in the mean."""
        return (self.last - self.first) / (self.count - 1) if self.count > 1 else None


class Anchor:
    """Sees every optimizer step of a program and says which of them ends a training step.

    With several optimizers a step is a whole turn of the loop: it ends with the optimizer that
    steps most rarely, and among equals with the one that came last in the first turn. Which one
    that is shows after two turns, and does not change any more once it is frozen.
    """

    def __init__(self) -> None:
        self.steps = 0
        """Optimizer steps seen, of all optimizers."""
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
    def _is_better(new: _Seen, held: _Seen) -> bool:
        if new.period is None or held.period is None:
            return new.period is not None
        if new.place > held.place:
            return new.period * _CLEARLY > held.period
        return new.period > held.period * _CLEARLY
