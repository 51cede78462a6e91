"""Detect the end of a training step from optimizer steps alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Hashable

_CLEARLY = 1.25
"""Ratio below which two periods count as equal."""
_LONGEST_WAIT = 64
"""Steps of other optimizers after which one that stepped once is not waited for."""


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

    With several optimizers a training step is one full iteration of the loop: the cycle of their
    steps that repeats. It ends with the optimizer that steps least often, and among equals with the
    one that came last in the first iteration: each that steps for the first time shows that the
    iteration had not ended. It is known after two iterations, and fixed by `freeze`.
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
        is_new = optimizer not in self._seen
        seen = self._seen.setdefault(optimizer, _Seen(len(self._seen), self.steps))
        seen.last = self.steps
        seen.count += 1
        if self._anchor is None:
            self._anchor = optimizer
        elif not self._frozen and (is_new or self._is_better(seen, self._seen[self._anchor])):
            # The anchor so far has ended this iteration.
            self._anchor = optimizer
            return False
        return optimizer == self._anchor

    def _is_better(self, new: _Seen, current: _Seen) -> bool:
        if new is current or new.period is None:
            return False
        if current.period is None:
            # It came last in the first iteration, and should come again after as many steps.
            return self.steps - current.first > min(current.first, _LONGEST_WAIT)
        if new.index > current.index:
            return new.period * _CLEARLY > current.period
        return new.period > current.period * _CLEARLY
