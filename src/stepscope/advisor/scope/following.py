"""Follow the training steps of a program from its optimizers and backward calls. Torch is imported
by `follow`, not before."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.advisor.scope.steps import StepFinder


class StepFollower:
    """Finds the steps of the process that made it. Subclasses say what happens at each event; the
    events of forked child processes are ignored."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._finder: StepFinder
        self._following: list[Any] = []

    def follow(self) -> None:
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        from stepscope.advisor.scope.steps import BackwardCalls, StepFinder

        self._finder = StepFinder()
        backwards = BackwardCalls(self._backward_begins, self._backward_ended)
        backwards.attach()
        self._following = [
            backwards,
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_stepped),
        ]

    def unfollow(self) -> None:
        for hook in self._following:
            hook.remove()
        self._following.clear()

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

    def on_backward_ended(self) -> None:
        """After a backward call, before the training step may end with it."""

    def on_misdetected(self) -> None:
        """When the first step of an optimizer shows that no step has ended so far."""

    def end_step(self) -> None:
        """At the end of each training step."""
        raise NotImplementedError

    # Events.

    def _optimizer_begins(self, optimizer: Any, *_: Any) -> Any:
        if self._is_own:
            self.on_optimizer(optimizer)
            if self._finder.optimizer_begins(optimizer):
                self.on_misdetected()

    def _optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        if self._is_own:
            self.on_optimizer_stepped(optimizer)
            if self._finder.optimizer_stepped(optimizer):
                self.end_step()

    def _backward_begins(self, roots: Any) -> None:
        if self._is_own:
            self.on_backward(roots)
            self._finder.backward_begins(roots)

    def _backward_ended(self) -> None:
        if self._is_own:
            self.on_backward_ended()
            if self._finder.backward_ended():
                self.end_step()
