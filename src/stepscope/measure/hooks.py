"""Hooks on a model that can be copied or saved while they are registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stepscope.torch_tools.module_hooks import Hook


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
