"""Fused projection of queries, keys and values, viewed as heads for attention.

Attention reads (batch, heads, seq, d_head) with any strides, so the heads are views of one matmul's
output. Autograd of the views would copy their gradients into one tensor by two operators or more,
and sum that tensor once more for the bias. Here one kernel does both; and if attention has written
the gradients into one such tensor, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stepscope.attention.inputs import matmul_dtype
from stepscope.attention.packed import Heads, packed_heads, split_heads
from stepscope.kernels.launch import kernels_take
from stepscope.kernels.matmul import SavedBias, fused_linear, project, projection_gradients
from stepscope.kernels.norm import Normed
from stepscope.kernels.weight_copies import WeightCopies, Weights
from stepscope.torch_tools.derivatives import differentiable_once, transforms_active


def projected_heads(
    x: Tensor,  # (batch, seq, d)
    weights: Weights,  # one (3 · heads · d_head, d), or one (heads · d_head, d) for each of q, k, v
    copies: WeightCopies,
    biases: Sequence[Tensor] = (),  # one per weight, or none at all
    *,
    heads: int,
    by_head: bool = False,
    transposed: bool = False,
) -> Heads:  # each (batch, heads, seq, d_head)
    """Return the heads of queries, keys and values as views of one projection. In the rows of a
    single weight all heads of q come first, then those of k and of v; with `by_head`, q, k and v of
    the first head come first. `transposed` and `copies` are those of `fused_linear`."""
    if transforms_active():
        projected = fused_linear(x, weights, copies, biases, transposed=transposed)
        return split_heads(projected, heads, by_head)
    if copies.fp8 is not None:
        in_fp8 = copies.fp8.linear(x, weights, copies, biases, transposed)
        if in_fp8 is not None:
            return split_heads(in_fp8, heads, by_head)
    dtype = matmul_dtype(x)
    parts: Heads = _ProjectedHeads.apply(  # type: ignore[no-untyped-call]
        x.to(dtype),
        (heads, by_head),
        copies.narrow(weights, dtype),
        copies.narrow_bias(biases, dtype),
        transposed,
        *weights,
        *biases,
    )
    return parts


class _ProjectedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layout: tuple[int, bool],
        narrow: Weights,
        bias: Tensor | None,
        transposed: bool,
        *weights_and_biases: Tensor,
    ) -> Heads:
        normed: Normed | None = None
        ctx.heads, ctx.by_head = layout
        projected = project(ctx, x, normed, narrow, bias, transposed, weights_and_biases)
        return split_heads(projected, ctx.heads, ctx.by_head)

    @staticmethod
    @differentiable_once("a fused projection", "the original module")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        needs_sums = any(ctx.needs_input_grad[len(ctx.needs_input_grad) - len(ctx.biases) :])
        packed = packed_heads(grads, ctx.by_head)
        sums = None
        if packed is None:
            packed, sums = _gathered(grads, ctx.by_head, ctx.biases if needs_sums else ())
        return projection_gradients(ctx, packed, sums)


def _gathered(
    grads: Sequence[Tensor], by_head: bool, biases: Sequence[SavedBias]
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients as one (batch, seq, 3 · heads · d_head) tensor and, if there are biases
    of one dtype, its sums over all tokens."""
    if kernels_take(*grads):
        from stepscope.kernels.triton.qkv import gather_heads

        dtypes = {bias.dtype for bias in biases}
        sums = None
        if len(dtypes) == 1:
            rows = sum(bias.rows for bias in biases)
            sums = torch.empty(rows, device=grads[0].device, dtype=dtypes.pop())
        parameters = [bias.parameter() for bias in biases]
        return gather_heads(grads[0], grads[1], grads[2], by_head, sums, parameters)
    parts = [grad.transpose(1, 2) for grad in grads]
    return torch.stack(parts, dim=3 if by_head else 2).flatten(2), None
