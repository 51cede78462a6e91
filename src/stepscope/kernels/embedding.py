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


def embedded(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return weight[tokens]."""
    few = 0 < tokens.numel() <= MAX_TOKENS
    if is_interpreted():
        few = few and max(tokens.numel(), weight.shape[0]) <= MAX_TOKENS_INTERPRETED
    if not few or weight.shape[1] > MAX_COLUMNS or not kernels_take(weight):
        return functional.embedding(tokens, weight)
    out: Tensor = _Embedded.apply(tokens.contiguous(), weight)  # type: ignore[no-untyped-call]
    return out


class _Embedded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.table = weight.shape[0], weight.dtype
        return functional.embedding(tokens, weight)

    @staticmethod
    @differentiable_once("the fused embedding", "fused=False")
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        from stepscope.kernels.triton.embedding import backward

        (tokens,) = ctx.saved_tensors
        return None, backward(tokens, grad.contiguous(), *ctx.table)
