"""Detection of `torch.func` transforms, and autograd Functions without a second derivative."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def transforms_active() -> bool:
    """Return whether a `torch.func` transform (`grad`, `vmap`, `jvp`, ...) or forward-mode AD is
    active. False under torch.compile, which traces through them."""
    return not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, anchor: Tensor, message: str) -> Tensor:
        del anchor
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(ctx.message)


def no_second_derivative(what: str, instead: str) -> str:
    """Return the error message of a double backward; `instead` names an alternative with one."""
    return f"{what} is differentiable once: there is no double backward ({instead} has one)"


def differentiable_once(what: str, instead: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorate the backward of an autograd Function that has no second derivative.

    torch's `once_differentiable` considers only the incoming gradient. If that is a constant, it
    treats the result as a constant too, although it depends on the saved tensors, and silently
    drops it from a second derivative.
    """
    message = no_second_derivative(what, instead)

    def decorated(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def run(ctx: Any, *grads: Tensor) -> Any:
            if not torch.is_grad_enabled():
                # Without create_graph no second derivative can be taken.
                return backward(ctx, *grads)
            with torch.no_grad():
                returned = backward(ctx, *grads)
            if torch.compiler.is_compiling():
                return returned
            anchor = torch.empty(0, requires_grad=True)
            marked = tuple(
                _NoSecondDerivative.apply(grad, anchor, message)  # type: ignore[no-untyped-call]
                if isinstance(grad, Tensor)
                else grad
                for grad in (returned if isinstance(returned, tuple) else (returned,))
            )
            return marked if isinstance(returned, tuple) else marked[0]

        return run

    return decorated
