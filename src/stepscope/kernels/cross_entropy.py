"""Fused linear cross-entropy: chunks of rows, so that all logits are never in memory at once.

A vocabulary that is not a multiple of 8 is padded by rows of zeros in a copy of the weight: cuBLAS
has only kernels for it that take several times as long. The gradients of the padding are zero.

For each chunk the logits are computed, reduced to losses, overwritten by their own gradient, and
multiplied into the gradients of x and weight; the next chunk reuses the buffer. The gradient of a
logit is divided by the number of rows immediately, except in float16, which can represent p -
onehot but would underflow after the division: there the division is part of the factor applied in
the backward pass. The rest of that factor is the upstream gradient, which is nearly always 1; the
device reads it, without synchronizing with the CPU, and skips the multiplication if it is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels import naive_cross_entropy as plain_cross_entropy
from stepscope.kernels.autotune import autotuning
from stepscope.kernels.launch import kernels_take
from stepscope.kernels.loss_chunks import matmul_columns, padded_columns, rows_per_chunk
from stepscope.kernels.matmul import add_matmul, matmul_into, matmul_to_dtype
from stepscope.kernels.weight_copies import WeightCopies, with_padded_rows
from stepscope.torch_tools.derivatives import differentiable_once, transforms_active
from stepscope.torch_tools.kernel_compilation import compile_kernels
from stepscope.torch_tools.ranges import named

LossAndGrads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""The loss, the factor by which the gradients must still be multiplied (empty: none), and the
gradients of x, weight and bias (empty if not needed)."""
_BIAS = 9
"""Position of the bias among the arguments of the autograd Function."""
_TARGETS = (torch.int64, torch.int32)
Scale = Callable[[list[Tensor], Tensor], list[Tensor]]
_compiled: set[tuple[object, ...]] = set()
"""Kinds of calls with kernels that are compiled."""


def linear_cross_entropy(
    x: Tensor,  # (..., d)
    weight: Tensor,  # (vocab, d)
    targets: Tensor,  # (...)
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    copies: WeightCopies | None = None,
    bias: Tensor | None = None,  # (vocab,)
) -> Tensor:
    """Compute the cross-entropy of the logits x weightᵀ + bias, in at least float32.

    Gradients are computed in the forward pass and scaled in place, so the backward pass can run
    only once, even with `retain_graph`. `copies` may have the weight in the matmul dtype.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
    if x.shape[:-1] != targets.shape or x.shape[-1] != weight.shape[-1] or weight.dim() != 2:
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}:"
            " the shapes must be (..., d), (vocab, d) and (...)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} for a weight {tuple(weight.shape)}")
    if not x.device == weight.device == targets.device:
        raise ValueError(
            f"x is on {x.device}, weight on {weight.device}, targets on {targets.device}:"
            " they must be on one device"
        )
    if targets.dtype not in _TARGETS:
        raise ValueError(f"targets are {targets.dtype}; they must be torch.int64 or torch.int32")
    rows = chunk_rows or rows_per_chunk(targets.numel(), weight.shape[0], x.shape[-1])
    flat, flat_targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    device_type = x.device.type
    compute = torch.promote_types(matmul_dtype(x), matmul_dtype(weight))
    with named("loss"), torch.autocast(device_type, enabled=False):
        grad_enabled = torch.is_grad_enabled()
        arguments = (
            flat,
            weight,
            flat_targets,
            ignore_index,
            rows,
            compute,
            reduction == "mean",
            grad_enabled and flat.requires_grad,
            grad_enabled and weight.requires_grad,
            bias,
            grad_enabled and bias is not None and bias.requires_grad,
        )
        if transforms_active():
            return _from_logits(flat, weight, bias, flat_targets, ignore_index, compute, reduction)
        if torch.compiler.is_compiling():
            outputs: LossAndGrads = _operator(*arguments)
            return outputs[0]
        narrow = None if copies is None else copies.narrow_padded(weight, compute)
        kind = (weight.device, weight.shape, weight.dtype, x.dtype, compute, bias is None)
        # GEMMs that are autotuned would be timed with zeros.
        if kind not in _compiled and kernels_take(flat) and not autotuning():
            _compiled.add(kind)
            compile_kernels(partial(_differentiated, *arguments, narrow))
        loss: Tensor = _LinearCrossEntropy.apply(*arguments, narrow)  # type: ignore[no-untyped-call]
        return loss


def loss_operator(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int,
    reduction: str,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute `linear_cross_entropy` of rows x as one operator, for graphs that are traced outside
    of `torch.compile`'s own tracer."""
    needs = torch.is_grad_enabled()
    compute = torch.promote_types(matmul_dtype(x), matmul_dtype(weight))
    with torch.autocast(x.device.type, enabled=False):
        outputs: LossAndGrads = _operator(
            x,
            weight,
            targets,
            ignore_index,
            rows_per_chunk(targets.numel(), weight.shape[0], x.shape[-1]),
            compute,
            reduction == "mean",
            needs and x.requires_grad,
            needs and weight.requires_grad,
            bias,
            needs and bias is not None and bias.requires_grad,
        )
    return outputs[0]


def _differentiated(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of the loss with respect to copies of its inputs."""
    inputs = [
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in arguments
    ]
    loss = _LinearCrossEntropy.apply(*inputs)  # type: ignore[no-untyped-call]
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    return torch.autograd.grad(loss, wanted)


def _from_logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    compute: torch.dtype,
    reduction: str,
) -> Tensor:
    """Compute all logits at once by torch operators, which transforms can differentiate and map."""
    added = None if bias is None else bias.to(compute)
    logits = functional.linear(x.to(compute), weight.to(compute), added)
    wide = logits.to(torch.promote_types(compute, torch.float32))
    return functional.cross_entropy(
        wide, targets.long(), ignore_index=ignore_index, reduction=reduction
    )


def _loss_and_grads(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk_rows: int,
    compute: torch.dtype,
    mean: bool,
    needs_x: bool,
    needs_weight: bool,
    bias: Tensor | None = None,
    needs_bias: bool = False,
    narrow: Tensor | None = None,
) -> LossAndGrads:
    wide = torch.promote_types(compute, torch.float32)
    rows, vocab = x.shape[0], weight.shape[0]
    needs_grad = needs_x or needs_weight or needs_bias
    targets = targets.contiguous()
    grad_bias = x.new_zeros(vocab if needs_bias else 0, dtype=wide)
    narrow = with_padded_rows(weight.detach(), compute) if narrow is None else narrow
    added = None if bias is None else with_padded_rows(bias.detach(), compute)
    buffer = x.new_empty(min(rows, chunk_rows), padded_columns(vocab), dtype=compute)
    if buffer.device.type == "cpu":
        # oneDNN's 16-bit matmul with AMX reads on to the next row, and multiplies by zero.
        buffer[:, matmul_columns(vocab) :] = 0.0
    losses = x.new_empty(rows, dtype=wide)
    kernels = _row_kernels(buffer)
    count, inverse_count = kernels.count_rows(targets, ignore_index, wide) if mean else (None, None)
    early_factor = inverse_count if _can_divide_early(compute) else None
    grad_x = x.new_empty(x.shape, dtype=compute) if needs_x else x.new_empty(0)
    grad_weight: Tensor | None = None
    for start in range(0, rows, chunk_rows):
        chunk = slice(start, start + chunk_rows)
        x_chunk = x[chunk].to(compute)
        logits = buffer[: x_chunk.shape[0], : matmul_columns(vocab)]
        if added is None:
            matmul_into(logits, x_chunk, narrow.T)
        else:
            torch.addmm(added, x_chunk, narrow.T, out=logits)
        kernels.write_losses(
            logits[:, :vocab],
            targets[chunk],
            losses[chunk],
            ignore_index,
            gradient=needs_grad,
            share=early_factor,
        )
        if needs_bias:
            grad_bias += logits[:, :vocab].sum(0, dtype=wide)
        if needs_x:
            matmul_into(grad_x[chunk], logits, narrow)
        if start + chunk_rows >= rows:
            # Free a copy created here before the gradient of the weight is computed.
            del narrow
        # Accumulated in at least float32: over many chunks a 16-bit sum would lose small terms.
        if grad_weight is not None:
            add_matmul(grad_weight, logits.T, x_chunk)
        elif needs_weight:
            grad_weight = matmul_to_dtype(logits.T, x_chunk, wide)
    if grad_weight is None:
        grad_weight = weight.new_zeros(weight.shape if needs_weight else 0, dtype=wide)
    loss = losses.sum() if count is None else kernels.mean_of(losses, count)
    late_factor = (
        inverse_count
        if inverse_count is not None and early_factor is None
        else x.new_empty(0, dtype=wide)
    )
    return loss, late_factor, grad_x, grad_weight[:vocab], grad_bias


def _row_kernels(logits: Tensor) -> ModuleType:
    if not kernels_take(logits):
        return plain_cross_entropy
    from stepscope.kernels.triton import cross_entropy as triton_cross_entropy

    return triton_cross_entropy


def _can_divide_early(compute: torch.dtype) -> bool:
    """Return whether the gradient of a logit can be divided by the number of rows before it is
    rounded: in float16 small values would underflow."""
    return compute != torch.float16


def _scale(grads: list[Tensor], factor: Tensor) -> list[Tensor]:
    # In the wider dtype: torch would first round a 0-d factor on the GPU to the narrower one.
    return [
        (grad.to(torch.promote_types(grad.dtype, factor.dtype)) * factor).to(grad.dtype)
        for grad in grads
    ]


def _scale_(grads: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Scale in place: memory is at its peak at the start of the backward pass."""
    if kernels_take(*grads):
        from stepscope.kernels.triton.scale import scale_unless_one

        scale_unless_one(grads, factor)
        return grads
    return [grad.mul_(factor) for grad in grads]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int,
        rows: int,
        compute: torch.dtype,
        mean: bool,
        needs_x: bool,
        needs_weight: bool,
        bias: Tensor | None,
        needs_bias: bool,
        narrow: Tensor | None,
    ) -> Tensor:
        loss, *factor_and_grads = _loss_and_grads(
            x, weight, targets, ignore_index, rows, compute, mean, needs_x, needs_weight, bias,
            needs_bias, narrow,
        )  # fmt: skip
        ctx.save_for_backward(*factor_and_grads)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.spent = False
        return loss

    @staticmethod
    @differentiable_once("the fused loss", "cross_entropy of the logits")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError(
                "the fused loss supports one backward: its gradients are computed in the forward"
                " and scaled in place"
            )
        ctx.spent = True
        of_x, of_weight, of_bias = _differentiate(ctx, grad, _scale_, (0, 1, _BIAS))
        return of_x, of_weight, *[None] * 7, of_bias, None, None


def _differentiate(
    ctx: Any, grad: Tensor, scale: Scale, positions: Sequence[int]
) -> list[Tensor | None]:
    """Return the gradients of the inputs at these positions."""
    late_factor, *grads = ctx.saved_tensors
    factor = grad * late_factor if late_factor.numel() else grad
    needed = [n for n, position in enumerate(positions) if ctx.needs_input_grad[position]]
    wide = [grads[n].to(torch.promote_types(grads[n].dtype, ctx.dtypes[n])) for n in needed]
    scaled = dict(zip(needed, scale(wide, factor), strict=True))
    return [scaled[n].to(ctx.dtypes[n]) if n in scaled else None for n in range(len(positions))]


# The compiler sees one operator: if it traced the chunks, it might save them for its own backward
# pass.
@torch.library.custom_op("stepscope::linear_cross_entropy", mutates_args=())
def _operator(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    rows: int,
    compute: torch.dtype,
    mean: bool,
    needs_x: bool,
    needs_weight: bool,
    bias: Tensor | None,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _loss_and_grads(
        x, weight, targets, ignore_index, rows, compute, mean, needs_x, needs_weight, bias,
        needs_bias,
    )  # fmt: skip


@_operator.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,  # noqa: ARG001
    ignore_index: int,  # noqa: ARG001
    rows: int,  # noqa: ARG001
    compute: torch.dtype,
    mean: bool,
    needs_x: bool,
    needs_weight: bool,
    bias: Tensor | None,  # noqa: ARG001
    needs_bias: bool,
) -> LossAndGrads:
    wide = torch.promote_types(compute, torch.float32)
    return (
        x.new_empty((), dtype=wide),
        x.new_empty(() if mean and not _can_divide_early(compute) else 0, dtype=wide),
        x.new_empty(x.shape, dtype=compute) if needs_x else x.new_empty(0),
        weight.new_empty(weight.shape if needs_weight else 0, dtype=wide),
        x.new_empty(weight.shape[0] if needs_bias else 0, dtype=wide),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: LossAndGrads) -> None:
    ctx.save_for_backward(*output[1:])
    bias = inputs[_BIAS]
    ctx.dtypes = (inputs[0].dtype, inputs[1].dtype, None if bias is None else bias.dtype)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate_traced(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients out of place and without Triton kernels: this is only traced, and
    `torch.compiler.is_compiling()` is False while a backward pass is traced."""
    of_x, of_weight, of_bias = _differentiate(ctx, grad, _scale, (0, 1, _BIAS))
    return of_x, of_weight, *[None] * 7, of_bias, None


_operator.register_autograd(_differentiate_traced, setup_context=_save)
