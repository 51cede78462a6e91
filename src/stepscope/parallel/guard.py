"""An optimizer must not step on gradients that are still on their way between ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from stepscope.parallel.errors import ParallelError


class Wrapper(Protocol):
    """A module that synchronizes gradients; `steps` counts how often it has."""

    @property
    def pending(self) -> bool:
        """A backward has run and the gradients are not averaged yet."""

    @property
    def steps(self) -> int: ...


def forgotten(wrapper: Wrapper) -> ParallelError:
    return ParallelError(
        f"finish_gradient_synchronization was not called in step {wrapper.steps}",
        "call it between backward and the optimizer",
    )


def refuse_early_steps(wrapper: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Any optimizer of these parameters raises while the wrapper has gradients pending."""
    held = weakref.ref(wrapper)
    own = {id(parameter) for parameter in parameters}

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        alive: Any = held()
        if alive is None or not alive.pending:
            return
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise forgotten(alive)

    handle = register_optimizer_step_pre_hook(before_step)
    weakref.finalize(wrapper, handle.remove)
