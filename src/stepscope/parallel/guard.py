"""Reject uses of a wrapper that would silently give wrong results."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn, Protocol, SupportsIndex

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from stepscope.parallel.errors import ParallelError


class Wrapper(Protocol):
    """A module that synchronizes gradients; `steps` counts the synchronizations."""

    @property
    def pending(self) -> bool:
        """True if a backward pass has run and the gradients are not averaged yet."""

    @property
    def steps(self) -> int: ...


def forgotten(wrapper: Wrapper) -> ParallelError:
    return ParallelError(
        f"finish_gradient_synchronization was not called in step {wrapper.steps}",
        "call it between the backward and the optimizer step",
    )


class NotCopied:
    """Base of wrappers that cannot be copied: they are bound to a process group and to hooks on
    their parameters, so a copy would not synchronize anything."""

    label: str
    instead: str
    """Alternative to copying it; the hint of the error."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ParallelError(f"{self.label} cannot be copied", self.instead)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ParallelError(f"{self.label} cannot be copied or pickled", self.instead)


def refuse_sparse_gradients(module: nn.Module) -> None:
    """Raise for embeddings with sparse gradients: messages between ranks are dense."""
    for name, inner in module.named_modules():
        trained = any(p.requires_grad for p in inner.parameters(recurse=False))
        if trained and getattr(inner, "sparse", False) is True:
            raise ParallelError(
                f"{name or 'the module'} is an {type(inner).__name__} with sparse=True, and sparse"
                " gradients are not averaged between ranks",
                "create it with sparse=False, or freeze it",
            )


def refuse_early_steps(wrapper: nn.Module) -> None:
    """Make any optimizer of the wrapper's parameters raise while gradients are pending."""
    reference = weakref.ref(wrapper)

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        alive: Any = reference()
        if alive is None or not alive.pending:
            return
        own = {id(parameter) for parameter in alive.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise forgotten(alive)

    handle = register_optimizer_step_pre_hook(before_step)
    weakref.finalize(wrapper, handle.remove)
