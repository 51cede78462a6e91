"""Follow the training steps of a program from its optimizers and backward calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stepscope.advisor.scope.steps import BackwardCalls, StepFinder
from stepscope.advisor.trial.calls import Calls
from stepscope.measure.modules import trained_models

NO_BACKWARD = -1


class StepFollower:
    """Counts the steps of the process that made it, and finds its trained models. Subclasses say
    what happens at each event."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._finder = StepFinder()
        self._steps = self._optimizers = 0
        self._models: list[torch.nn.Module] = []
        self._calls: list[Calls] = []

    def follow(self) -> None:
        BackwardCalls(self._backward_begins, self._backward_ended).attach()
        register_optimizer_step_pre_hook(self._optimizer_begins)
        register_optimizer_step_post_hook(self._optimizer_stepped)

    @property
    def _is_own(self) -> bool:
        """Whether an event is one of the program, and not of a child process."""
        return os.getpid() == self._pid

    # What a subclass does.

    def on_optimizer(self, optimizer: Any) -> None:
        """Before a step of an optimizer."""

    def on_optimizer_stepped(self, optimizer: Any) -> None:
        """After a step of an optimizer, before the training step may end with it."""

    def on_backward(self, roots: Any) -> None:
        """Before a backward call."""

    def on_call(self, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """In place of a call of a model."""
        return call(*arguments, **keywords)

    def end_step(self) -> None:
        """At the end of each training step."""
        raise NotImplementedError

    def write(self) -> None:
        """Before the program is ended."""
        raise NotImplementedError

    # Events.

    def _optimizer_begins(self, optimizer: Any, *_: Any) -> None:
        if self._is_own:
            self.on_optimizer(optimizer)
            self._finder.optimizer_begins(optimizer)

    def _optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        if self._is_own:
            self.on_optimizer_stepped(optimizer)
            if self._finder.optimizer_stepped(optimizer):
                self._end_step()

    def _backward_begins(self, roots: Any) -> None:
        if self._is_own:
            self.on_backward(roots)
            self._finder.backward_begins(roots)

    def _backward_ended(self) -> None:
        if self._is_own and self._finder.backward_ended():
            self._end_step()

    def _end_step(self) -> None:
        self._steps += 1
        self.end_step()

    def _find_models(self) -> bool:
        """Find the trained models; return False if no other optimizer has stepped since then."""
        if len(self._finder.optimizers) == self._optimizers > 0:
            return False
        self._optimizers = len(self._finder.optimizers)
        new = [m for m in trained_models(self._finder.parameters) if m not in self._models]
        self._models += new
        self._calls += [Calls(model, self.on_call) for model in new]
        return True

    def _exit(self) -> None:
        """End the program at once: a script that catches an exception would continue."""
        self.write()
        sys.stdout.flush()
        os._exit(0)
