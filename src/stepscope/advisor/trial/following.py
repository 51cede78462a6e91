"""Follow the training steps of a program, and find the models that it trains."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from stepscope.advisor.scope.following import StepFollower
from stepscope.advisor.trial.calls import Calls
from stepscope.measure.modules import trained_models

NO_BACKWARD = -1


class ModelFollower(StepFollower):
    """Counts the steps, and finds the trained models with their calls. Subclasses say what happens
    at each event."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = self._optimizers = 0
        self._models: list[torch.nn.Module] = []
        self._calls: list[Calls] = []

    # What a subclass does.

    def on_call(self, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """In place of a call of a model."""
        return call(*arguments, **keywords)

    def on_step(self) -> None:
        """At the end of each training step, which has been counted."""
        raise NotImplementedError

    def write(self) -> None:
        """Before the program is ended."""
        raise NotImplementedError

    def end_step(self) -> None:
        self._steps += 1
        self.on_step()

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
