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


def count_readers(parameter: Tensor) -> int:
    """Return the number of hooks of a parameter that may read its gradient."""
    after: Any = parameter._post_accumulate_grad_hooks or {}
    before: Any = parameter._backward_hooks or {}
    return len(before) + len(after)
