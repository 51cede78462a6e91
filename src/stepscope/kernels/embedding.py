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
    few = 0 < tokens.numel() <= MAX_TOKENS
    if is_interpreted():
        few = few and max(tokens.numel(), weight.shape[0]) <= MAX_TOKENS_INTERPRETED
    if not few or weight.shape[1] > MAX_COLUMNS or not kernels_take(weight):
        return functional.embedding(tokens, weight, padding_idx)
    out: Tensor = _Embedded.apply(tokens.contiguous(), weight, padding_idx)  # type: ignore[no-untyped-call]
    return out


class _Embedded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.padding_idx = padding_idx
        ctx.table = weight.shape[0], weight.dtype
        return functional.embedding(tokens, weight)

    @staticmethod
    @differentiable_once("the fused embedding", "fused=False")
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        from stepscope.kernels.triton.embedding import backward

        (tokens,) = ctx.saved_tensors
        grad_weight = backward(tokens, grad.contiguous(), *ctx.table)
        if ctx.padding_idx is not None:
            grad_weight[ctx.padding_idx].zero_()
        return None, grad_weight, None
