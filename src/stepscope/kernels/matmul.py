"""Fused projections: matmuls that read the same input as one, with gradients in the weight dtype.

Autocast computes the gradient of a weight in the matmul dtype and then casts it: written, read and
written again. Here the matmul writes it directly in the weight dtype, which is also the dtype of
its accumulator; or in the matmul dtype, if an optimizer-in-backward consumes it as it is.
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
from stepscope.kernels.autotune import autotuned_matmul_into, autotuning
from stepscope.kernels.norm import Normed
from stepscope.kernels.weight_copies import WeightCopies, Weights
from stepscope.torch_tools.derivatives import differentiable_once, transforms_active
from stepscope.torch_tools.side_stream import gradient_consumer


def fused_linear(
    x: Tensor | Normed,  # (..., d)
    weights: Weights,  # each (rows, d)
    copies: WeightCopies,
) -> Tensor:  # (..., all rows)
    """Return x times each weight transposed, side by side. `copies` has the weights in the matmul
    dtype."""
    read = x.value if isinstance(x, Normed) else x
    dtype = matmul_dtype(read)
    if transforms_active():
        # The transforms differentiate and map torch's own operators.
        rows = torch.cat([weight.to(dtype) for weight in weights])
        return functional.linear(read.to(dtype), rows)
    if copies.fp8 is not None:
        in_fp8 = copies.fp8.linear(x, weights, copies)
        if in_fp8 is not None:
            return in_fp8
    normed = x if isinstance(x, Normed) else None
    out: Tensor = _FusedLinear.apply(  # type: ignore[no-untyped-call]
        read.to(dtype), normed, copies.narrow(weights, dtype), *weights
    )
    return out


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, normed: Normed | None, narrow: Weights, *weights: Tensor
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ctx.x = SavedInput(ctx, flat, normed, narrow)
        ctx.learned = WeightGradients(weights)
        out = linear_concat(flat, narrow)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @differentiable_once("a fused projection", "fused_projections=False")
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, narrow, _ = ctx.x.restore(ctx)
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = linear_grad_input(flat, narrow).view(*grad.shape[:-1], x.shape[-1])
        return grad_x, None, None, *ctx.learned.gradients(flat, x, ctx.needs_input_grad[3:])


class SavedInput:
    """The saved input of a matmul: the input itself, or the unit rows it is recomputed from."""

    def __init__(
        self, ctx: Any, x: Tensor, normed: Normed | None, narrow: Weights, *more: Tensor
    ) -> None:
        recompute = normed is not None and normed.unit is not None
        source = (normed.unit, normed.weight) if recompute else (x,)  # type: ignore[union-attr]
        self._recompute, self._narrow = recompute, len(narrow)
        ctx.save_for_backward(*source, *narrow, *more)

    def restore(self, ctx: Any) -> tuple[Tensor, Weights, tuple[Tensor, ...]]:
        """Return the input, the weights, and the other saved tensors."""
        saved = ctx.saved_tensors
        first = 1 + self._recompute
        end = first + self._narrow
        x = saved[0]
        if self._recompute:
            from stepscope.kernels.triton.norm import scaled

            x = scaled(*saved[:2]).view(-1, saved[0].shape[-1])
        return x, saved[first:end], saved[end:]


class WeightGradients:
    """Computes the gradients of weights that one matmul reads side by side."""

    def __init__(self, weights: Weights) -> None:
        self._dtype = weights[0].dtype
        self._shapes = [weight.shape for weight in weights]
        # Weak references: weights gathered from several ranks must be freed before the backward
        # pass.
        self._owners = [weakref.ref(weight) for weight in weights]

    def gradients(
        self, grad: Tensor, x: Tensor, needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Return the row ranges of one matmul, or None for weights that need no gradient or whose
        gradient was consumed by an optimizer. Nothing may read the weights after this."""

        def matmul(dtype: torch.dtype) -> Tensor:
            return matmul_to_dtype(grad.T, x, dtype)

        return self.computed(matmul, x.dtype, needed)

    def computed(
        self, matmul: Callable[[torch.dtype], Tensor], narrow: torch.dtype, needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Return the same with a function that returns the gradient of all weights in a dtype: that
        of the weights, or `narrow`, in which an optimizer may consume it."""
        if not any(needed):
            return (None,) * len(self._owners)
        weights = [owner() for owner in self._owners]
        consumer = gradient_consumer(weights, narrow)
        if consumer is None:
            return self._split(matmul(self._dtype))
        for weight, gradient in zip(weights, self._split(matmul(narrow)), strict=True):
            assert weight is not None
            consumer.take(weight, gradient)
        return (None,) * len(weights)

    def _split(self, gradients: Tensor) -> tuple[Tensor, ...]:
        rows = torch.split(gradients, [shape[0] for shape in self._shapes])
        return tuple(part.view(shape) for part, shape in zip(rows, self._shapes, strict=True))


def linear_concat(x: Tensor, narrow: Weights) -> Tensor:
    """Return x times each weight transposed, side by side."""
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
    """Return the gradient of the input, summed over the weights."""
    if len(narrow) == 1:
        return matmul_to_dtype(grad, narrow[0], grad.dtype)
    parts = torch.split(grad, [weight.shape[0] for weight in narrow], dim=1)
    out = matmul_to_dtype(parts[0], narrow[0], grad.dtype)
    for part, weight in zip(parts[1:], narrow[1:], strict=True):
        add_matmul(out, part, weight)
    return out


def matmul_to_dtype(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a b in a dtype that may be wider than that of a and b, rounded once."""
    if autotuning():
        out = a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
        if autotuned_matmul_into(out, a, b):
            return out
        del out
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda and _has_out_dtype():
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def matmul_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    if not autotuned_matmul_into(out, a, b):
        torch.mm(a, b, out=out)


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a b, where total may have a wider dtype."""
    if autotuned_matmul_into(total, a, b, accumulate=True):
        return
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and _has_out_dtype():
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


@functools.cache
def _has_out_dtype() -> bool:
    """Return whether torch's matmuls have `out_dtype`, as they do since 2.8."""
    probe = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    wide: Callable[..., Tensor] = torch.addmm
    try:
        total = torch.zeros(16, 16, device="cuda")
        wide(total, probe, probe, out_dtype=torch.float32, out=total)
        torch.mm(probe, probe, out_dtype=torch.float32)
    except torch.OutOfMemoryError:
        # It does not show what torch supports, and the result is cached.
        raise
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True
