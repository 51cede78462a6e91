"""Rows of a table for tokens, with a gradient of our own.

torch fills the whole gradient with zeros, sorts the tokens, then few programs walk over them. Here
one launch lists the tokens by row and one has a program for every row, which adds up its tokens'
gradients in a fixed order, so the bits repeat.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.kernels.launch import kernels_take
from stepscope.kernels.norm import WIDEST
from stepscope.torch_tools.derivatives import differentiable_once
from stepscope.torch_tools.triton_available import is_interpreted

MOST_TOKENS, MOST_INTERPRETED = 32_768, 1024
"""All tokens are compared with all: beyond so many a sort is faster, and the interpreter slow."""


def embedded(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens]."""
    few = 0 < tokens.numel() <= MOST_TOKENS
    if is_interpreted():
        few = few and max(tokens.numel(), weight.shape[0]) <= MOST_INTERPRETED
    if not few or weight.shape[1] > WIDEST or not kernels_take(weight):
        return functional.embedding(tokens, weight)
    made: Tensor = _Embedded.apply(tokens.contiguous(), weight)  # type: ignore[no-untyped-call]
    return made


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
