"""The head and its loss without all logits: by chunks of rows, gradients made on the way.

The logits of one chunk are made, turned into losses and then into their own gradient, multiplied
into the gradients of the inputs and written over by those of the next. A gradient of a logit is
divided by the number of rows at once, but in float16, which holds p - onehot and not a small part
of it: there that is part of the factor at the end. The rest of it comes from above and is 1 nearly
always; the device looks, so nothing has to be known on the host, and where it is 1 nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels import naive_cross_entropy as plain_cross_entropy
from stepscope.kernels.launch import kernels_take
from stepscope.kernels.loss_chunks import padded_columns, rows_per_chunk
from stepscope.kernels.matmul import add_matmul, matmul_into, matmul_to_dtype
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.torch_tools.derivatives import differentiable_once, transforms_active
from stepscope.torch_tools.ranges import named

Made = tuple[Tensor, Tensor, Tensor, Tensor]
"""The loss, what gradients are still to be multiplied by (empty: nothing), and those of x and
weight (empty where nobody asks)."""
_TARGETS = (torch.int64, torch.int32)
Scale = Callable[[list[Tensor], Tensor], list[Tensor]]


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
    if not x.device == weight.device == targets.device:
        raise ValueError(
            f"x is on {x.device}, weight on {weight.device}, targets on {targets.device}:"
            " they must be on one device"
        )
    if targets.dtype not in _TARGETS:
        raise ValueError(f"targets are {targets.dtype}; they must be torch.int64 or torch.int32")
    rows = chunk_rows or rows_per_chunk(targets.numel(), weight.shape[0], x.shape[-1])
    flat, flat_targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1).contiguous()
    kind = x.device.type
    compute = torch.promote_types(matmul_dtype(x), matmul_dtype(weight))
    with named("loss"), torch.autocast(kind, enabled=False):
        learns = torch.is_grad_enabled()
        arguments = (
            flat, weight, flat_targets, ignore_index, rows, compute, reduction == "mean",
            learns and flat.requires_grad, learns and weight.requires_grad,
        )  # fmt: skip
        if transforms_active():
            return _from_logits(flat, weight, flat_targets, ignore_index, compute, reduction)
        if torch.compiler.is_compiling():
            made: Made = _operator(*arguments)
            return made[0]
        narrow = None if copies is None else copies.narrow((weight,), compute)[0]
        loss: Tensor = _LinearCrossEntropy.apply(*arguments, narrow)  # type: ignore[no-untyped-call]
        return loss


def _from_logits(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, compute: torch.dtype,
    reduction: str,
) -> Tensor:  # fmt: skip
    """All logits at once, by operators of torch that its transforms differentiate and map."""
    logits = functional.linear(x.to(compute), weight.to(compute))
    wide = logits.to(torch.promote_types(compute, torch.float32))
    return functional.cross_entropy(
        wide, targets.long(), ignore_index=ignore_index, reduction=reduction
    )


def _make(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk_rows: int,
    compute: torch.dtype, mean: bool, needs_x: bool, needs_weight: bool,
    narrow: Tensor | None = None,
) -> Made:  # fmt: skip
    wide = torch.promote_types(compute, torch.float32)
    rows, vocab, learns = x.shape[0], weight.shape[0], needs_x or needs_weight
    narrow = weight.to(compute) if narrow is None else narrow
    held = x.new_empty(min(rows, chunk_rows), padded_columns(vocab), dtype=compute)
    losses = x.new_empty(rows, dtype=wide)
    form = _row_form(held)
    count, share = form.count_rows(targets, ignore_index, wide) if mean else (None, None)
    early = share if _has_room(compute) else None
    grad_x = x.new_empty(x.shape, dtype=compute) if needs_x else x.new_empty(0)
    grad_weight: Tensor | None = None
    for start in range(0, rows, chunk_rows):
        part = slice(start, start + chunk_rows)
        read = x[part].to(compute)
        logits = held[: read.shape[0], :vocab]
        matmul_into(logits, read, narrow.T)
        form.write_losses(
            logits, targets[part], losses[part], ignore_index, gradient=learns, share=early
        )
        if needs_x:
            matmul_into(grad_x[part], logits, narrow)
        if start + chunk_rows >= rows:
            # A copy made here need not be there while the gradient of the weight is made.
            del narrow
        # Over many chunks a sum in a 16-bit format would lose the small ones.
        if grad_weight is not None:
            add_matmul(grad_weight, logits.T, read)
        elif needs_weight:
            grad_weight = matmul_to_dtype(logits.T, read, wide)
    if grad_weight is None:
        grad_weight = weight.new_zeros(weight.shape if needs_weight else 0, dtype=wide)
    loss = losses.sum() if count is None else form.mean_of(losses, count)
    left = share if share is not None and early is None else x.new_empty(0, dtype=wide)
    return loss, left, grad_x, grad_weight


def _row_form(logits: Tensor) -> ModuleType:
    if not kernels_take(logits):
        return plain_cross_entropy
    from stepscope.kernels.triton import cross_entropy as triton_cross_entropy

    return triton_cross_entropy


def _has_room(compute: torch.dtype) -> bool:
    """Whether a gradient of a logit can be divided by the number of rows before it is rounded: in
    float16 the small ones would vanish."""
    return compute != torch.float16


def _scaled(made: list[Tensor], factor: Tensor) -> list[Tensor]:
    # In the wider format: torch would round a factor on the GPU to the narrower one first.
    return [
        (each.to(torch.promote_types(each.dtype, factor.dtype)) * factor).to(each.dtype)
        for each in made
    ]


def _scale(made: list[Tensor], factor: Tensor) -> list[Tensor]:
    """In place: at the start of a backward memory is at its peak."""
    if kernels_take(*made):
        from stepscope.kernels.triton.scale import scale_unless_one

        scale_unless_one(made, factor)
        return made
    return [each.mul_(factor) for each in made]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, rows: int,
        compute: torch.dtype, mean: bool, needs_x: bool, needs_weight: bool,
        narrow: Tensor | None,
    ) -> Tensor:  # fmt: skip
        loss, *made = _make(
            x, weight, targets, ignore_index, rows, compute, mean, needs_x, needs_weight, narrow
        )
        ctx.save_for_backward(*made)
        ctx.formats = (x.dtype, weight.dtype)
        ctx.spent = False
        return loss

    @staticmethod
    @differentiable_once("the fused loss", "cross_entropy of the logits")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError(
                "the fused loss has one backward: its gradients, made in the forward, are scaled in"
                " place"
            )
        ctx.spent = True
        return *_differentiate(ctx, grad, _scale), None


def _differentiate(ctx: Any, grad: Tensor, scale: Scale) -> tuple[Tensor | None, ...]:
    left, *made = ctx.saved_tensors
    factor = grad * left if left.numel() else grad
    needed = [number for number in range(2) if ctx.needs_input_grad[number]]
    wide = [
        made[number].to(torch.promote_types(made[number].dtype, ctx.formats[number]))
        for number in needed
    ]
    scaled = dict(zip(needed, scale(wide, factor), strict=True))
    grads = (scaled[n].to(ctx.formats[n]) if n in scaled else None for n in range(2))
    return (*grads, *[None] * 7)


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
    compute: torch.dtype, mean: bool, needs_x: bool, needs_weight: bool,
) -> Made:  # fmt: skip
    wide = torch.promote_types(compute, torch.float32)
    return (
        x.new_empty((), dtype=wide),
        x.new_empty(() if mean and not _has_room(compute) else 0, dtype=wide),
        x.new_empty(x.shape, dtype=compute) if needs_x else x.new_empty(0),
        weight.new_empty(weight.shape if needs_weight else 0, dtype=wide),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Made) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.formats = (inputs[0].dtype, inputs[1].dtype)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate_traced(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """Never in place and without kernels: this is only traced, and while a backward is traced torch
    does not say that it compiles."""
    return _differentiate(ctx, grad, _scaled)


_operator.register_autograd(_differentiate_traced, setup_context=_save)
