"""Backwards that have no derivative of their own, and say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, anchor: Tensor, said: str) -> Tensor:
        del anchor
        ctx.said = said
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(ctx.said)


def differentiable_once(what: str, instead: str) -> Callable[[Callable[..., Any]], Any]:
    """For the backward of an autograd Function; `instead` is what has a second derivative.

    Torch's `once_differentiable` looks at the gradient from above alone. Where that is a constant
    it calls the result one, although it depends on what the forward saved, and leaves it out of a
    second derivative without a word.
    """
    said = f"{what} is differentiable once: there is no double backward ({instead} has one)"

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
