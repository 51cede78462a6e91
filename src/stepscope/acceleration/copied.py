"""Copies of weights as inputs of a graph: in the matmul dtype, or in FP8.

A region that casts its weights does so in every step, and saves the casts for its backward pass.
Here `WeightCopies` makes them before the region runs: it casts as the region would, or in a
captured step returns what the update of the optimizer has written. The gradient of the copy goes to
the weights in the matmul dtype, and an optimizer-in-backward reads it as it is.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepscope.kernels.fp8.layers import Fp8Layers
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.torch_tools.side_stream import widened


@dataclass(frozen=True)
class Copied:
    """Inputs of a graph that are made of weights, which are other inputs."""

    weights: tuple[str, ...]
    """Names of the inputs with the weights, whose rows are in one copy."""
    names: tuple[str, ...]
    """Names of what is made of them."""
    copies: WeightCopies
    dtype: torch.dtype
    fp8: Fp8Layers | None = None
    """Makes copies in FP8: values, their inverse scale, and a tensor that gets the gradient."""
    transposed: bool = False
    """The weight is stored as (d, rows)."""

    def __call__(self, *weights: Tensor) -> tuple[Tensor, ...]:
        made: Any = _Copy.apply(self, *weights)  # type: ignore[no-untyped-call]
        return made if isinstance(made, tuple) else (made,)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copied: Copied, *weights: Tensor) -> Any:
        ctx.dtype = weights[0].dtype
        ctx.rows = [weight.shape[0] for weight in weights]
        # Not kept alive: weights gathered from several ranks are freed before the backward pass.
        ctx.weights = [weakref.ref(weight) for weight in weights]
        ctx.set_materialize_grads(False)
        if copied.fp8 is None:
            (narrow,) = copied.copies.narrow(weights, copied.dtype)
            # A new tensor: the copy itself must not become part of this autograd graph.
            return narrow.detach()
        (weight,) = weights
        operands = copied.fp8.operands((weight,), copied.copies, copied.transposed)
        values, inverse = operands.operand(rows=not copied.transposed)
        values, inverse = values.detach(), inverse.detach()
        ctx.mark_non_differentiable(values, inverse)
        # Takes the gradient, which has another dtype than the values; nothing reads it.
        slot = torch.empty_strided(weight.shape, (0, 0), dtype=copied.dtype, device=values.device)
        return values, inverse, slot

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        gradient = gradients[-1]
        if gradient is None:
            return None, *[None] * len(ctx.rows)
        parts = torch.split(gradient, ctx.rows)
        return None, *widened([weight() for weight in ctx.weights], parts, ctx.dtype)
