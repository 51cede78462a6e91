"""Fused projections: matmuls that read the same input as one, with gradients in the weight dtype.

Autocast computes the gradient of a weight in the matmul dtype and then casts it: written, read and
written again. Here the matmul writes it directly in the weight dtype, which is also the dtype of
its accumulator; or in the matmul dtype, if an optimizer-in-backward consumes it as it is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels.autotune import autotuned_matmul_into, autotuning
from stepscope.kernels.norm import Normed
from stepscope.kernels.tensor_facts import note_bias, take_sums
from stepscope.kernels.weight_copies import WeightCopies, Weights
from stepscope.torch_tools.derivatives import differentiable_once, transforms_active
from stepscope.torch_tools.side_stream import gradient_consumer


def fused_linear(
    x: Tensor | Normed,  # (..., d)
    weights: Weights,  # each (rows, d), or (rows, ...) with d entries in a row
    copies: WeightCopies,
    biases: Sequence[Tensor] = (),  # one (rows,) per weight, or none at all
    *,
    transposed: bool = False,
) -> Tensor:  # (..., all rows)
    """Return x times each weight transposed, plus its bias, side by side. `copies` has the weights
    in the matmul dtype. With `transposed` there is one weight, stored as (d, rows) such as
    GPT-2's."""
    read = x.value if isinstance(x, Normed) else x
    dtype = matmul_dtype(read)
    if transforms_active():
        # The transforms differentiate and map torch's own operators.
        return functional.linear(
            read.to(dtype),
            torch.cat([stored_as_rows(weight, transposed).to(dtype) for weight in weights]),
            torch.cat([bias.to(dtype) for bias in biases]) if biases else None,
        )
    if copies.fp8 is not None and weights[0].dim() == 2:
        in_fp8 = copies.fp8.linear(x, weights, copies, biases, transposed)
        if in_fp8 is not None:
            return in_fp8
    normed = x if isinstance(x, Normed) else None
    out: Tensor = _FusedLinear.apply(  # type: ignore[no-untyped-call]
        read.to(dtype),
        normed,
        copies.narrow(weights, dtype),
        copies.narrow_bias(biases, dtype),
        transposed,
        *weights,
        *biases,
    )
    return note_bias(out, biases)


def stored_as_rows(weight: Tensor, transposed: bool) -> Tensor:
    """Return a weight, which may be stored as (d, rows) or be that of a convolution, as a view of
    (rows, d)."""
    return weight.T if transposed else weight.flatten(1)


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        normed: Normed | None,
        narrow: Weights,
        bias: Tensor | None,
        transposed: bool,
        *weights_and_biases: Tensor,
    ) -> Tensor:
        return project(ctx, x, normed, narrow, bias, transposed, weights_and_biases)

    @staticmethod
    @differentiable_once("a fused projection", "fused_projections=False")
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return projection_gradients(ctx, grad, take_sums(grad))


FIRST_WEIGHT = 5
"""Position of the first weight among the arguments of an autograd Function that projects."""


def project(
    ctx: Any,
    x: Tensor,  # (..., d)
    normed: Normed | None,
    narrow: Weights,
    bias: Tensor | None,
    transposed: bool,
    weights_and_biases: Sequence[Tensor],
) -> Tensor:  # (..., all rows)
    """Compute a fused projection, and save what `projection_gradients` needs."""
    weights = tuple(tensor for tensor in weights_and_biases if tensor.dim() > 1)
    narrow = tuple(stored_as_rows(weight, transposed) for weight in narrow)
    flat = x.reshape(-1, x.shape[-1])
    ctx.x = SavedInput(ctx, flat, normed, narrow)
    ctx.learned = WeightGradients(weights, transposed)
    ctx.biases = saved_biases(weights_and_biases[len(weights) :])
    out = linear_concat(flat, narrow, bias)
    return out.view(*x.shape[:-1], out.shape[-1])


def projection_gradients(
    ctx: Any,
    grad: Tensor,  # (..., all rows)
    bias_sums: Tensor | None = None,  # (all rows,)
) -> tuple[Any, ...]:
    """Return the gradients of the arguments of an autograd Function that has called `project`.
    `bias_sums` are the gradients of the biases, if a kernel has summed them."""
    x, narrow, _ = ctx.x.restore(ctx)
    flat = grad.reshape(-1, grad.shape[-1])
    grad_x = None
    if ctx.needs_input_grad[0]:
        grad_x = linear_grad_input(flat, narrow).view(*grad.shape[:-1], x.shape[-1])
    end = len(ctx.needs_input_grad) - len(ctx.biases)
    of_biases = bias_gradients(flat, ctx.biases, ctx.needs_input_grad[end:], bias_sums)
    of_weights = ctx.learned.gradients(flat, x, ctx.needs_input_grad[FIRST_WEIGHT:end])
    return grad_x, None, None, None, None, *of_weights, *of_biases


def concatenated(biases: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return the biases as one tensor in that dtype; None if there are none."""
    if not biases:
        return None
    return biases[0].to(dtype) if len(biases) == 1 else torch.cat(list(biases)).to(dtype)


class SavedBias(NamedTuple):
    """What the backward pass needs of a bias."""

    rows: int
    dtype: torch.dtype
    parameter: weakref.ref[Tensor]

    def empty(self, device: torch.device) -> Tensor:
        """Return memory for its gradient."""
        return torch.empty(self.rows, device=device, dtype=self.dtype)


def saved_biases(biases: Sequence[Tensor]) -> list[SavedBias]:
    return [SavedBias(bias.shape[0], bias.dtype, weakref.ref(bias)) for bias in biases]


def bias_gradients(
    grad: Tensor,  # (tokens, all rows)
    biases: Sequence[SavedBias],
    needed: Sequence[bool],
    total: Tensor | None = None,  # (all rows,)
) -> tuple[Tensor | None, ...]:
    """Return the gradients of biases: sums over all tokens, which may be known as `total`. A cast
    would wait for the stream that writes it, so it is used in its own dtype only."""
    if not any(needed):
        return (None,) * len(biases)
    if total is None or any(bias.dtype != total.dtype for bias in biases):
        total = grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32))
    one = len(biases) == 1
    parts = (total,) if one else torch.split(total, [bias.rows for bias in biases])
    return tuple(part.to(bias.dtype) for part, bias in zip(parts, biases, strict=True))


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

    def __init__(self, weights: Weights, transposed: bool = False) -> None:
        self._dtype, self._transposed = weights[0].dtype, transposed
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
            a, b = (x.T, grad) if self._transposed else (grad.T, x)
            return matmul_to_dtype(a, b, dtype)

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


def linear_concat(x: Tensor, narrow: Weights, bias: Tensor | None = None) -> Tensor:
    """Return x times each weight transposed, side by side, plus the bias."""
    if len(narrow) == 1:
        if bias is not None:
            return torch.addmm(bias, x, narrow[0].T)
        return matmul_to_dtype(x, narrow[0].T, x.dtype)
    out = x.new_empty(x.shape[0], sum(weight.shape[0] for weight in narrow))
    start = 0
    for weight in narrow:
        end = start + weight.shape[0]
        matmul_into(out[:, start:end], x, weight.T)
        start = end
    return out if bias is None else out.add_(bias)


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
