"""Gradient hooks that do not keep their owner alive, and which hooks may read a gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

Owner = TypeVar("Owner")


def hook_of(owner: Owner, parameter: Tensor, act: Callable[[Owner, Tensor], None]) -> Any:
    """Call `act(owner, parameter)` after a gradient is accumulated into the parameter; return the
    handle.

    The hook has a weak reference: a parameter stores its hooks where the garbage collector does not
    look, so that a strong reference to the owner would form a cycle that is never freed.
    """
    reference = weakref.ref(owner)

    def hook(parameter: Tensor) -> None:
        alive = reference()
        if alive is not None:
            act(alive, parameter)

    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def hook_for_life(owner: Owner, parameter: Tensor, act: Callable[[Owner, Tensor], None]) -> None:
    """Register the same hook and remove it when its owner is freed."""
    weakref.finalize(owner, hook_of(owner, parameter, act).remove)


class _Notification:
    """A hook that does not read the gradient."""

    def __init__(self, act: Callable[[Tensor], None]) -> None:
        self._act = act

    def __call__(self, parameter: Tensor) -> None:
        self._act(parameter)


def notify(parameter: Tensor, act: Callable[[Tensor], None]) -> Any:
    """Call `act(parameter)`, which does not read the gradient, after one is accumulated; return the
    handle."""
    return parameter.register_post_accumulate_grad_hook(_Notification(act))  # type: ignore[no-untyped-call]


def count_readers(parameter: Tensor) -> int:
    """Return the number of hooks of a parameter that may read its gradient."""
    after: Any = parameter._post_accumulate_grad_hooks or {}
    before: Any = parameter._backward_hooks or {}
    return len(before) + sum(not isinstance(hook, _Notification) for hook in after.values())
