"""Time that the host takes to issue each phase of a step.

In a normal step the host is ahead of the device, behind it, or blocked by a full queue, and its own
time cannot be separated. Here the device is idle whenever a phase begins, so nothing blocks the
host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from stepscope.advisor.scope.loading import batches_taken
from stepscope.advisor.scope.steps import BackwardCalls
from stepscope.measure.modules import hooked_roots

OUTSIDE, DATA, FORWARD, BACKWARD = "outside", "data", "forward", "backward"
OPTIMIZER = "optimizer"
PHASES = (OUTSIDE, DATA, FORWARD, BACKWARD, OPTIMIZER)


class IssueClock:
    """Call `begin` and `end` around a step, and `turn` around the optimizer's update.

    Hooks mark the forward. The backward, which includes the loss, lasts from there until `backward`
    returns: a program that then reads the loss waits for the device, which is not issue time.
    Everything else is `outside`, except loading batches from a DataLoader.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self.steps: list[dict[str, float]] = []
        """Milliseconds by phase, for each step."""
        self._spent: dict[str, float] | None = None
        self._phase, self._since = OUTSIDE, 0.0

    def hooked(self, models: Sequence[torch.nn.Module]) -> ExitStack | None:
        """Add hooks to the models, removed when the result is closed; None if impossible."""

        def enter(*_: Any) -> None:
            if torch.is_grad_enabled():
                self.turn(FORWARD)

        def leave(*_: Any) -> None:
            if self._phase == FORWARD:
                self.turn(BACKWARD)

        hooks = hooked_roots(models, enter, leave)
        if hooks is not None:
            hooks.enter_context(batches_taken(self._loading))
            backwards = BackwardCalls(lambda _: None, self._after_backward)
            backwards.attach()
            hooks.callback(backwards.remove)
        return hooks

    def _after_backward(self) -> None:
        if self._phase == BACKWARD:
            self.turn(OUTSIDE)

    @contextmanager
    def _loading(self, _: Any) -> Iterator[None]:
        before = self._phase
        self.turn(DATA)
        try:
            yield
        finally:
            self.turn(before)

    def begin(self) -> None:
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._start(OUTSIDE)

    def turn(self, phase: str) -> None:
        """Start another phase of the host."""
        if self._spent is not None:
            self._spent[self._phase] += 1e3 * (time.perf_counter() - self._since)
            self._start(phase)

    def end(self) -> None:
        if self._spent is not None:
            self.turn(OUTSIDE)
            self.steps.append(self._spent)
            self._spent = None

    def drop(self) -> None:
        """Discard the current step."""
        self._spent = None

    def _start(self, phase: str) -> None:
        self._synchronize()
        self._phase, self._since = phase, time.perf_counter()
