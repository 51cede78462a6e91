"""Matrix products that read the same input, as one, with gradients in the weights' own format.

Autocast makes the gradient of a weight in the format of the products and then casts it: written,
read and written again. Here the product writes it in the weight's format at once, which is also
what it was summed in; or, where an optimizer takes it as it is, in the format of the products.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels.autotune import multiplied_into, searching
from stepscope.kernels.norm import Normed
from stepscope.kernels.weight_copies import WeightCopies, Weights
from stepscope.torch_tools.derivatives import differentiable_once, transforms_active
from stepscope.torch_tools.side_stream import taker_of


def fused_linear(
    x: Tensor | Normed,  # (..., d)
    weights: Weights,  # each (rows, d)
    copies: WeightCopies,
) -> Tensor:  # (..., all rows)
    """x times each weight transposed, side by side."""
    read = x.value if isinstance(x, Normed) else x
    dtype = matmul_dtype(read)
    if transforms_active():
        # They differentiate and map torch's own operators.
        return functional.linear(
            read.to(dtype), torch.cat([weight.to(dtype) for weight in weights])
        )
    narrow = copies.narrow(weights, dtype)
    kept = x if isinstance(x, Normed) else None
    made: Tensor = _Joined.apply(read.to(dtype), kept, narrow, *weights)  # type: ignore[no-untyped-call]
    return made


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, normed: Normed | None, narrow: Weights, *weights: Tensor
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ctx.x = SavedInput(ctx, flat, normed, narrow)
        ctx.learned = Learned(weights)
        made = linear_concat(flat, narrow)
        return made.view(*x.shape[:-1], made.shape[-1])

    @staticmethod
    @differentiable_once("a joined product", "joined=False")
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, narrow, _ = ctx.x.again(ctx)
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = linear_grad_input(flat, narrow).view(*grad.shape[:-1], x.shape[-1])
        return grad_x, None, None, *ctx.learned.gradients(flat, x, ctx.needs_input_grad[3:])


class SavedInput:
    """What a product keeps of its input: itself, or what it can be made of again."""

    def __init__(
        self, ctx: Any, x: Tensor, normed: Normed | None, narrow: Weights, *more: Tensor
    ) -> None:
        remade = normed is not None and normed.unit is not None
        held = (normed.unit, normed.weight) if remade else (x,)  # type: ignore[union-attr]
        self._remade, self._narrow = remade, len(narrow)
        ctx.save_for_backward(*held, *narrow, *more)

    def again(self, ctx: Any) -> tuple[Tensor, Weights, tuple[Tensor, ...]]:
        """Input, weights, and what else was kept."""
        held = ctx.saved_tensors
        first = 1 + self._remade
        end = first + self._narrow
        x = held[0]
        if self._remade:
            from stepscope.kernels.triton.norm import scaled

            x = scaled(*held[:2]).view(-1, held[0].shape[-1])
        return x, held[first:end], held[end:]


class Learned:
    """Weights that products read side by side: what a backward has to know of them."""

    def __init__(self, weights: Weights) -> None:
        self._dtype = weights[0].dtype
        self._rows = [weight.shape[0] for weight in weights]
        # Weakly: what was gathered from several ranks has to be free to go.
        self._owners = [weakref.ref(weight) for weight in weights]

    def gradients(
        self, grad: Tensor, x: Tensor, needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Row ranges of one product; None where somebody took them, or needs none. Nothing may read
        the weights after this."""
        if not any(needed):
            return (None,) * len(self._owners)
        weights = [owner() for owner in self._owners]
        taker = taker_of(weights, x.dtype)
        if taker is None:
            return torch.split(matmul_to_dtype(grad.T, x, self._dtype), self._rows)
        narrow = matmul_to_dtype(grad.T, x, x.dtype)
        for weight, made in zip(weights, torch.split(narrow, self._rows), strict=True):
            assert weight is not None
            taker.take(weight, made)
        return (None,) * len(weights)


def linear_concat(x: Tensor, narrow: Weights) -> Tensor:
    """x times each transposed, side by side."""
    if len(narrow) == 1:
        return matmul_to_dtype(x, narrow[0].T, x.dtype)
    out = x.new_empty(x.shape[0], sum(weight.shape[0] for weight in narrow))
    start = 0
    for weight in narrow:
        end = start + weight.shape[0]
        matmul_into(out[:, start:end], x, weight.T)
        start = end
    return out


def linear_grad_input(grad: Tensor, narrow: Weights) -> Tensor:
    """The gradient towards the input, summed over the weights."""
    if len(narrow) == 1:
        return matmul_to_dtype(grad, narrow[0], grad.dtype)
    parts = torch.split(grad, [weight.shape[0] for weight in narrow], dim=1)
    out = matmul_to_dtype(parts[0], narrow[0], grad.dtype)
    for part, weight in zip(parts[1:], narrow[1:], strict=True):
        add_matmul(out, part, weight)
    return out


def matmul_to_dtype(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in a format that may be wider than theirs, rounded once."""
    if searching():
        out = a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
        if multiplied_into(out, a, b):
            return out
        del out
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda and _writes_wide():
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def matmul_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    if not multiplied_into(out, a, b):
        torch.mm(a, b, out=out)


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, where total may be wider."""
    if multiplied_into(total, a, b, adds=True):
        return
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and _writes_wide():
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


@functools.cache
def _writes_wide() -> bool:
    """cuBLAS always could; torch passes it on since 2.8."""
    probe = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    wide: Callable[..., Tensor] = torch.addmm
    try:
        total = torch.zeros(16, 16, device="cuda")
        wide(total, probe, probe, out_dtype=torch.float32, out=total)
        torch.mm(probe, probe, out_dtype=torch.float32)
    except torch.OutOfMemoryError:
        # It says nothing about what torch can do, and the answer is kept.
        raise
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True
