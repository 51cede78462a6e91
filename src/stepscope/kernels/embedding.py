"""Embedding lookup with a deterministic backward kernel.

torch fills the full gradient with zeros and sorts the tokens, and then few programs iterate over
them. Here one launch lists the tokens by row, and another has a program per row that sums the
gradients of its tokens in a fixed order, so the result is bitwise reproducible.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.kernels.launch import kernels_take
from stepscope.kernels.norm import MAX_COLUMNS
from stepscope.torch_tools.derivatives import differentiable_once
from stepscope.torch_tools.triton_available import is_interpreted

MAX_TOKENS, MAX_TOKENS_INTERPRETED = 32_768, 1024
"""Maximum number of tokens: every token is compared with every other, so beyond this a sort is
faster, and the interpreter too slow."""


def embedded(tokens: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Return weight[tokens]. The row of `padding_idx` gets no gradient."""
    if not _kernel_takes(tokens, weight, weight.shape[0]):
        return functional.embedding(tokens, weight, padding_idx)
    return looked_up(tokens, weight, padding_idx)


def _kernel_takes(tokens: Tensor, rows_like: Tensor, rows: int) -> bool:
    """Return whether the kernel computes the gradient of a table with that number of rows, which
    has the columns, dtype and device of `rows_like`."""
    few = 0 < tokens.numel() <= MAX_TOKENS
    if is_interpreted():
        few = few and max(tokens.numel(), rows) <= MAX_TOKENS_INTERPRETED
    return few and rows_like.shape[-1] <= MAX_COLUMNS and kernels_take(rows_like)


def looked_up(tokens: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    """Return weight[tokens]. Its gradient is one operator, also in graphs, that chooses between the
    kernel and torch when it runs."""
    out: Tensor = _LookedUp.apply(tokens, weight, padding_idx)  # type: ignore[no-untyped-call]
    return out


class _LookedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.padding_idx = -1 if padding_idx is None else padding_idx
        ctx.table = weight.shape[0], weight.dtype
        return functional.embedding(tokens, weight)

    @staticmethod
    @differentiable_once("the fused embedding", "fused=False")
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (tokens,) = ctx.saved_tensors
        return None, _gradient(grad, tokens, *ctx.table, ctx.padding_idx), None


@torch.library.custom_op("stepscope::embedding_gradient", mutates_args=())
def _gradient(
    grad: Tensor, tokens: Tensor, rows: int, dtype: torch.dtype, padding_idx: int
) -> Tensor:
    """Return the gradient of the table; the row of `padding_idx` gets none, unless it is -1."""
    if not _kernel_takes(tokens, grad, rows):
        found: Tensor = torch.ops.aten.embedding_dense_backward(
            grad, tokens, rows, padding_idx, False
        )
        return found.to(dtype)
    from stepscope.kernels.triton.embedding import backward

    made = backward(tokens.contiguous(), grad.contiguous(), rows, dtype)
    if padding_idx >= 0:
        made[padding_idx].zero_()
    return made


@_gradient.register_fake
def _(
    grad: Tensor,
    tokens: Tensor,  # noqa: ARG001
    rows: int,
    dtype: torch.dtype,
    padding_idx: int,  # noqa: ARG001
) -> Tensor:
    return grad.new_empty(rows, grad.shape[-1], dtype=dtype)
