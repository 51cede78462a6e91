"""Optimizers whose step may get a closure, as those of torch do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import overload

import torch
from torch.optim.optimizer import Optimizer


class ClosureOptimizer(Optimizer):
    """An optimizer of which subclasses define the update alone."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters; a closure computes the loss and its gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @abstractmethod
    def _step(self) -> None:
        """Update with the gradients that exist."""
