"""The head and its loss without all logits: by chunks of rows, gradients made on the way.

The logits of one chunk are made, turned into losses and then into their own gradient, multiplied
into the gradients of the inputs and forgotten. What the loss is divided by and what comes from
above are one factor, multiplied in at the end: until then a gradient of a logit is p - onehot,
which float16 holds, and nothing has to be known on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stepscope.model.cost import rows_of_a_chunk
from stepscope.model.kernels.copies import WeightCopies
from stepscope.model.kernels.launching import kernels_take
from stepscope.model.kernels.products import add_product
from stepscope.ranges import named

Made = tuple[Tensor, Tensor, Tensor, Tensor]
"""The loss, what gradients are to be divided by, and those of x and weight (empty where nobody
asks)."""


def linear_cross_entropy(
    x: Tensor,  # (..., d)
    weight: Tensor,  # (vocab, d)
    targets: Tensor,  # (...)
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    copies: WeightCopies | None = None,
) -> Tensor:
    """Cross-entropy of the logits x weightᵀ, in float32 at least.

    Gradients are scaled in place, so a backward runs once, also with `retain_graph`. `copies` has
    the weight in the format of the products, where it is kept.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
    if x.shape[:-1] != targets.shape or x.shape[-1] != weight.shape[-1] or weight.dim() != 2:
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}:"
            " (..., d), (vocab, d) and (...) go together"
        )
    rows = chunk_rows or rows_of_a_chunk(targets.numel(), weight.shape[0], x.shape[-1])
    flat, flat_targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        compute = torch.get_autocast_dtype(kind)
    else:
        compute = torch.promote_types(x.dtype, weight.dtype)
    with named("loss"), torch.autocast(kind, enabled=False):
        learns = torch.is_grad_enabled()
        arguments = (
            flat, weight, flat_targets, ignore_index, rows, compute, reduction == "mean",
            learns and flat.requires_grad, learns and weight.requires_grad,
        )  # fmt: skip
        if torch.compiler.is_compiling():
            made: Made = _operator(*arguments)
            return made[0]
        narrow = None if copies is None else copies.narrow((weight,), compute)[0]
        loss: Tensor = _LinearCrossEntropy.apply(*arguments, narrow)  # type: ignore[no-untyped-call]
        return loss


def _make(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk_rows: int,
    compute: torch.dtype, mean: bool, needs_x: bool, needs_weight: bool,
    narrow: Tensor | None = None,
) -> Made:  # fmt: skip
    wide = torch.promote_types(compute, torch.float32)
    narrow = weight.to(compute) if narrow is None else narrow
    grad_x = x.new_empty(x.shape, dtype=compute) if needs_x else x.new_empty(0)
    # Over many chunks a sum in a 16-bit format would lose the small ones.
    grad_weight = (
        weight.new_zeros(weight.shape, dtype=wide) if needs_weight else weight.new_empty(0)
    )
    losses = x.new_empty(x.shape[0], dtype=wide)
    for start in range(0, x.shape[0], chunk_rows):
        part = slice(start, start + chunk_rows)
        read = x[part].to(compute)
        logits = read @ narrow.T
        losses[part] = _losses(logits, targets[part], ignore_index, needs_x or needs_weight)
        if needs_x:
            torch.mm(logits, narrow, out=grad_x[part])
        if needs_weight:
            add_product(grad_weight, logits.T, read)
    count = (targets != ignore_index).sum().to(wide)
    total = losses.sum()
    if not mean:
        return total, torch.ones_like(total), grad_x, grad_weight
    # No row counts: the loss is NaN as torch's is, and no gradient moves anything.
    return total / count, count.clamp(min=1), grad_x, grad_weight


def _losses(logits: Tensor, targets: Tensor, ignore_index: int, gradient: bool) -> Tensor:
    """-log p(target) of every row; with `gradient` the logits become p - onehot(target)."""
    if kernels_take(logits):
        from stepscope.model.kernels.triton_cross_entropy import losses_of_rows

        return losses_of_rows(logits, targets, ignore_index, gradient)
    counts = targets != ignore_index
    column = torch.where(counts, targets, 0)[:, None]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_mass = wide.logsumexp(-1, keepdim=True)
    losses = torch.where(counts, (log_mass - wide.gather(-1, column))[:, 0], 0)
    if gradient:
        p = torch.exp(wide - log_mass)
        p.scatter_add_(-1, column, torch.full_like(log_mass, -1))
        logits.copy_(p.mul_(counts[:, None]))
    return losses


def _scaled(made: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """In place where the format stays and no compiler watches: at the start of a backward memory is
    at its peak."""
    wide = made.to(torch.promote_types(made.dtype, dtype))
    if torch.compiler.is_compiling():
        return (wide * factor).to(dtype)
    return wide.mul_(factor).to(dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, rows: int,
        compute: torch.dtype, mean: bool, needs_x: bool, needs_weight: bool,
        narrow: Tensor | None,
    ) -> Tensor:  # fmt: skip
        loss, divisor, grad_x, grad_weight = _make(
            x, weight, targets, ignore_index, rows, compute, mean, needs_x, needs_weight, narrow
        )
        ctx.save_for_backward(divisor, grad_x, grad_weight)
        ctx.formats = (x.dtype, weight.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_differentiate(ctx, grad), None


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    divisor, *made = ctx.saved_tensors
    factor = grad / divisor
    needed = ctx.needs_input_grad[:2]
    scaled = [
        _scaled(each, factor, dtype) if needs else None
        for each, dtype, needs in zip(made, ctx.formats, needed, strict=True)
    ]
    return (*scaled, *[None] * 7)


# The compiler sees one operator: traced, the chunks might be kept for its own backward.
@torch.library.custom_op("stepscope::linear_cross_entropy", mutates_args=())
def _operator(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, rows: int,
    compute: torch.dtype, mean: bool, needs_x: bool, needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _make(x, weight, targets, ignore_index, rows, compute, mean, needs_x, needs_weight)


@_operator.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, rows: int,  # noqa: ARG001
    compute: torch.dtype, mean: bool, needs_x: bool, needs_weight: bool,  # noqa: ARG001
) -> Made:  # fmt: skip
    wide = torch.promote_types(compute, torch.float32)
    return (
        x.new_empty((), dtype=wide),
        x.new_empty((), dtype=wide),
        x.new_empty(x.shape, dtype=compute) if needs_x else x.new_empty(0),
        weight.new_empty(weight.shape, dtype=wide) if needs_weight else weight.new_empty(0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Made) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.formats = (inputs[0].dtype, inputs[1].dtype)
    ctx.mark_non_differentiable(*output[1:])


_operator.register_autograd(_differentiate, setup_context=_save)
