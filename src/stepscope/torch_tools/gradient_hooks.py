"""Hooks on gradients that do not keep alive who put them there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

Owner = TypeVar("Owner")


def hook_of(owner: Owner, parameter: Tensor, act: Callable[[Owner, Tensor], None]) -> Any:
    """`act(owner, parameter)` whenever a gradient was added to the parameter's own; the handle.

    A parameter keeps its hooks where no collector looks: what they hold to, it would itself be held
    by for ever.
    """
    held = weakref.ref(owner)

    def tell(parameter: Tensor) -> None:
        alive = held()
        if alive is not None:
            act(alive, parameter)

    return parameter.register_post_accumulate_grad_hook(tell)  # type: ignore[no-untyped-call]


def hook_for_life(owner: Owner, parameter: Tensor, act: Callable[[Owner, Tensor], None]) -> None:
    """The same, gone with its owner."""
    weakref.finalize(owner, hook_of(owner, parameter, act).remove)
