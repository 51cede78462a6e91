"""FlashAttention under `torch.func`: `grad`, `vjp`, `vmap` and their compositions.

The transforms need an autograd Function with a separate `setup_context` and a `vmap` rule. Such a
Function costs more CPU time per call than a short attention takes on the GPU, so these run only
under a transform. A dimension that `vmap` maps over becomes one more leading dimension, of which
attention takes any number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepscope.torch_tools.derivatives import no_second_derivative

RULES_UNDER_TRANSFORMS = "torch.func transforms are not supported with rules"


@dataclass(frozen=True, eq=False)
class Passes:
    """Forward and backward pass of an implementation, for any number of leading dimensions."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    """(q, k, v) to the output and the log-sum-exp of each row."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    """(gradient, q, k, v, output, log-sum-exp) to the gradients of q, k and v."""


def attend_under_transforms(q: Tensor, k: Tensor, v: Tensor, passes: Passes) -> Tensor:
    out: Tensor = _Attention.apply(q, k, v, passes)[0]  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, passes: Passes) -> tuple[Tensor, ...]:
        return passes.forward(q, k, v)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, ctx.passes = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*_Gradients.apply(grad, *ctx.saved_tensors, ctx.passes), None)  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(_no_forward_mode(ctx.passes.name))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        return _Attention.apply(*_mapped_first(info, in_dims, inputs)), (0, 0)  # type: ignore[no-untyped-call]


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, passes: Passes
    ) -> tuple[Tensor, ...]:
        return passes.backward(grad, q, k, v, out, lse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        del output
        ctx.passes = inputs[-1]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(no_second_derivative(ctx.passes.name, "impl='reference'"))

    @staticmethod
    def jvp(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(_no_forward_mode(ctx.passes.name))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        return _Gradients.apply(*_mapped_first(info, in_dims, inputs)), (0, 0, 0)  # type: ignore[no-untyped-call]


def _no_forward_mode(name: str) -> str:
    return f"{name} has no forward-mode derivative (impl='reference' has one)"


def _mapped_first(
    info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Move the mapped dimension first; a tensor without one is expanded over the batch."""
    *tensors, passes = inputs
    moved = [
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, in_dims[:-1], strict=True)
    ]
    return (*moved, passes)
