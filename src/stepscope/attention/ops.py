"""Our attention as torch operators: for autograd, for torch.compile, and as an autograd Function.

`stepscope::flash_forward` and `stepscope::flash_backward` are opaque to the compiler; their fake
forms tell it the shapes. Inputs are (B, H, M, D) and (B, H/G, N, D).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

TINY_SCALE = 1e-30
"""Stands in for a scale of zero, which would turn the -inf of a masked score into NaN."""


def _kernels() -> Any:
    from stepscope.attention import triton_launch

    return triton_launch


def _rows_contiguous(x: Tensor) -> Tensor:
    """The kernels walk the last dimension by ones."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@torch.library.custom_op("stepscope::flash_forward", mutates_args=())
def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, shift: int
) -> tuple[Tensor, Tensor]:
    """Output, and the log-sum-exp of each row; a row sees key j iff j <= row + shift."""
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    out, lse = _kernels().forward(q, k, v, scale=scale, causal=is_causal, shift=shift)
    return out, lse


@flash_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, shift: int  # noqa: ARG001
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(_rows_contiguous(q)), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("stepscope::flash_backward", mutates_args=())
def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    is_causal: bool, scale: float, shift: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    dq, dk, dv = _kernels().backward(
        _rows_contiguous(grad), q, k, v, out, lse, scale=scale, causal=is_causal, shift=shift
    )
    return dq, dk, dv


@flash_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,  # noqa: ARG001
    is_causal: bool, scale: float, shift: int,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    made = [torch.empty_like(_rows_contiguous(x)) for x in (q, k, v)]
    return made[0], made[1], made[2]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.is_causal, ctx.scale, ctx.shift = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.mark_non_differentiable(lse)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    made = flash_backward(grad, q, k, v, out, lse, ctx.is_causal, ctx.scale, ctx.shift)
    return (*made, None, None, None)


flash_forward.register_autograd(_differentiate, setup_context=_save)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None, shift: int
) -> Tensor:
    """Our kernels on (B, H, M, D) tensors; inputs have been checked."""
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if factor < 0:
        q, factor = -q, -factor
    out: Tensor = flash_forward(q, k, v, is_causal, factor or TINY_SCALE, shift)[0]
    return out


class FlashAttentionTriton(torch.autograd.Function):
    """`.apply(q, k, v, is_causal=False)` on (B, M, D) or (B, H, M, D).

    Saves q, k, v, the output and one tensor of shape q.shape[:-1]: the log-sum-exp of the scores.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        heads = [_with_heads(x) for x in (q, k, v)]
        scale = 1.0 / math.sqrt(q.shape[-1])
        made: tuple[Tensor, Tensor] = flash_forward(*heads, is_causal, scale, 0)
        out, lse = made[0].view(q.shape), made[1].view(q.shape[:-1])
        ctx.is_causal, ctx.scale = is_causal, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        heads = [_with_heads(x) for x in (grad, q, k, v, out)]
        lse = lse.view(heads[1].shape[:-1])
        grads = flash_backward(*heads, lse, ctx.is_causal, ctx.scale, 0)
        return (*(g.view(x.shape) for g, x in zip(grads, (q, k, v), strict=True)), None)


def _with_heads(x: Tensor) -> Tensor:
    if x.dim() == 4:
        return x
    if x.dim() == 3:
        return x.unsqueeze(1)
    raise ValueError(f"q, k and v have 3 or 4 dimensions here, not {x.dim()}")
