"""Hooks in a model that its owner may copy or save while they are there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


class Hook:
    """Passes on that it was called, in the very model that it was put into.

    In a copy of that model, and in one that was saved and loaded, a function of Python's own that
    does nothing stands in its place: a file can be loaded where there is no stepscope.
    """

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def __call__(self, *given: Any) -> None:
        self._tell(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        # `copy` asks this as `pickle` does.
        return getattr, (nullcontext(), "__exit__")


def around_calls(
    module: torch.nn.Module, enter: Callable[..., None], leave: Callable[..., None]
) -> list[Any]:
    """`enter` ahead of all that a call of the module does, `leave` at its end, even a bad one."""
    return [
        module.register_forward_pre_hook(Hook(enter), prepend=True),
        module.register_forward_hook(Hook(leave), always_call=True),
    ]


def after_gradient(parameter: torch.Tensor, tell: Callable[[torch.Tensor], None]) -> Any:
    """`tell` when a gradient has been added to the parameter's own."""
    return parameter.register_post_accumulate_grad_hook(Hook(tell))  # type: ignore[no-untyped-call]
