"""Derivatives: whether a `torch.func` transform is active, and backwards without a second one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def transforms_active() -> bool:
    """Whether a `torch.func` transform (`grad`, `vmap`, `jvp`, ...) or forward-mode AD is active,
    outside of the compiler, which traces through them."""
    return not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, anchor: Tensor, said: str) -> Tensor:
        del anchor
        ctx.said = said
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(ctx.said)


def no_second_derivative(what: str, instead: str) -> str:
    """The message of a double backward; `instead` is what has a second derivative."""
    return f"{what} is differentiable once: there is no double backward ({instead} has one)"


def differentiable_once(what: str, instead: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorate the backward of an autograd Function that has no second derivative.

    Torch's `once_differentiable` looks at the gradient from above alone. Where that is a constant
    it calls the result one, although it depends on what the forward saved, and leaves it out of a
    second derivative without a word.
    """
    said = no_second_derivative(what, instead)

    def decorated(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def run(ctx: Any, *grads: Tensor) -> Any:
            with torch.no_grad():
                found = backward(ctx, *grads)
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return found
            anchor = torch.empty(0, requires_grad=True)
            marked = tuple(
                _NoSecondDerivative.apply(each, anchor, said)  # type: ignore[no-untyped-call]
                if isinstance(each, Tensor)
                else each
                for each in (found if isinstance(found, tuple) else (found,))
            )
            return marked if isinstance(found, tuple) else marked[0]

        return run

    return decorated
