"""Hooks on a model that can be copied or saved while they are registered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


class Hook:
    """Forwards calls to a callback, in the model where it was registered.

    In a copy of that model, and in a model that was saved and loaded, a builtin that does nothing
    replaces it: the file can be loaded where stepscope is not installed.
    """

    def __init__(self, callback: Callable[..., None]) -> None:
        self._callback = callback

    def __call__(self, *given: Any) -> None:
        self._callback(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        # Both `copy` and `pickle` use this method.
        return getattr, (nullcontext(), "__exit__")


def around_calls(
    module: torch.nn.Module, enter: Callable[..., None], leave: Callable[..., None]
) -> list[Any]:
    """Call `enter(module, args, kwargs)` before each forward call of the module and `leave` after
    it, even if it raises."""
    return [
        module.register_forward_pre_hook(Hook(enter), prepend=True, with_kwargs=True),
        module.register_forward_hook(Hook(leave), always_call=True),
    ]


def after_gradient(parameter: torch.Tensor, callback: Callable[[torch.Tensor], None]) -> Any:
    """Call `callback` whenever a gradient has been accumulated into the parameter."""
    return parameter.register_post_accumulate_grad_hook(Hook(callback))  # type: ignore[no-untyped-call]
