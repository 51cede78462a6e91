"""How long the host takes to issue each phase of a step.

While a step runs as it always does, the host is ahead of the device, behind it, or stopped by a
full queue, and its time shows in none of them. Here the device is idle whenever a phase begins, so
nothing holds the host up but itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from stepscope.measure.modules import hooked_roots

OUTSIDE, FORWARD, BACKWARD, OPTIMIZER = "outside", "forward", "backward", "optimizer"
PHASES = (OUTSIDE, FORWARD, BACKWARD, OPTIMIZER)


class IssueClock:
    """`begin` and `end` around a step; forwards are seen by hooks, and who sees the optimizer says
    so. What lies between the two is the backward, the loss with it; what is before, outside."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self.steps: list[dict[str, float]] = []
        """Milliseconds by phase."""
        self._spent: dict[str, float] | None = None
        self._phase, self._since = OUTSIDE, 0.0

    def hooked(self, models: Sequence[torch.nn.Module]) -> ExitStack | None:
        """Hooks to be taken off again; None where a model cannot have one."""

        def enter(*_: Any) -> None:
            if torch.is_grad_enabled():
                self.turn(FORWARD)

        def leave(*_: Any) -> None:
            if self._phase == FORWARD:
                self.turn(BACKWARD)

        return hooked_roots(models, enter, leave)

    def begin(self) -> None:
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._start(OUTSIDE)

    def turn(self, phase: str) -> None:
        """From here on the host is in another phase."""
        if self._spent is not None:
            self._spent[self._phase] += 1e3 * (time.perf_counter() - self._since)
            self._start(phase)

    def end(self) -> None:
        if self._spent is not None:
            self.turn(OUTSIDE)
            self.steps.append(self._spent)
            self._spent = None

    def _start(self, phase: str) -> None:
        self._synchronize()
        self._phase, self._since = phase, time.perf_counter()
