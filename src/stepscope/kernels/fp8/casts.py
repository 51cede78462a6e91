"""Operands of FP8 GEMMs: a tensor in FP8 as rows and as columns, with the scales of a recipe.

A GEMM contracts over the last dimension of both operands. Of a (tokens, d) activation, the forward
pass reads the rows and the gradient of the weight reads the columns, (d, tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stepscope.kernels.fp8.recipe import BLOCKWISE, E4M3, ROWWISE, TENSORWISE, Recipe
from stepscope.kernels.fp8.reference import cast as plain_cast
from stepscope.kernels.launch import kernels_take

Operand = tuple[Tensor, Tensor]
"""(rows, contracted) in float8, and its inverse scales: a scalar, (rows, 1), or (rows, blocks)."""


class Quantized(NamedTuple):
    """A (rows, columns) tensor as operands of two GEMMs; either may be missing."""

    rows: Operand | None  # contracted over columns
    columns: Operand | None  # (columns, rows), contracted over rows
    scale: Tensor | None = None
    """The scale of the tensor, if it has one."""

    def operand(self, rows: bool) -> Operand:
        found = self.rows if rows else self.columns
        assert found is not None
        return found


class History:
    """Largest absolute values of one tensor of a layer in the last steps, on its device."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.values = torch.zeros(length, device=device)
        self.pending = torch.zeros((), device=device)
        self.saturated = torch.zeros((), device=device, dtype=torch.int32)
        """Values that were larger than those of the history, and have been limited."""
        self.is_fresh = True
        """No step has been recorded: the first cast takes the scale of its own values."""


class Histories(NamedTuple):
    """The histories of the input of a layer and of the gradient of its output."""

    x: History
    grad: History

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device) -> Histories:
        return cls(History(recipe.history, device), History(recipe.history, device))


def quantize(
    x: Tensor,  # (rows, columns)
    dtype: str,
    recipe: Recipe,
    *,
    rows: bool = True,
    columns: bool = True,
    partial: Tensor | None = None,
    scale: Tensor | None = None,
    history: History | None = None,
    out_rows: Tensor | None = None,
    out_columns: Tensor | None = None,
) -> Quantized:
    """Cast a tensor for the GEMMs that read it as rows, as columns, or both. For recipes with one
    scale per tensor: `partial` has largest absolute values of its parts, computed by the kernel
    that produced it; `scale` is a known scale; `history` that of delayed scaling, which also counts
    saturated values. `out_rows` and `out_columns` are where the kernels write the copies."""
    if not kernels_take(x):
        return _plain(x, dtype, recipe, rows, columns, scale)
    from stepscope.kernels.triton import fp8

    if x.stride(1) != 1:
        x = x.contiguous()
    shape, swapped = (x.shape[0], x.shape[1]), (x.shape[1], x.shape[0])
    of_rows, of_columns = out_rows, out_columns
    if rows and of_rows is None:
        of_rows = fp8.empty(shape, x, dtype)
    if columns and of_columns is None:
        of_columns = fp8.empty(swapped, x, dtype)
    if recipe.scaling == ROWWISE:
        row_partial, column_partial = fp8.amax(x, by_row=True)
        assert column_partial is not None
        row, column = fp8.row_scales(row_partial, dtype), fp8.row_scales(column_partial, dtype)
        fp8.cast(x, of_rows, of_columns, dtype, ROWWISE, row.scale, column.scale)
        return _pair(of_rows, row.inverse.view(-1, 1), of_columns, column.inverse.view(-1, 1))
    if recipe.scaling == BLOCKWISE:
        tiles_r, tiles_c = fp8.tiles(*shape)
        row_inverse, column_inverse = (
            torch.empty(n, device=x.device, dtype=torch.float32)
            for n in ((tiles_c, shape[0]), (tiles_r, shape[1]))
        )
        fp8.cast(x, of_rows, of_columns, dtype, BLOCKWISE, row_inverse, column_inverse)
        # cuBLAS reads the scales of one block of all rows side by side.
        return _pair(of_rows, row_inverse.T, of_columns, column_inverse.T)
    pending = saturated = None
    if scale is not None:
        used = fp8.Scale(scale, scale.reciprocal())
    elif history is None or history.is_fresh:
        used = fp8.scale(fp8.amax(x)[0] if partial is None else partial, dtype)
    else:
        used = fp8.delayed_scale(history.values, history.pending, dtype)
    if history is not None and scale is None:
        pending, saturated, history.is_fresh = history.pending, history.saturated, False
    fp8.cast(x, of_rows, of_columns, dtype, recipe.scaling, used.scale, None, pending, saturated)
    return _pair(of_rows, used.inverse, of_columns, used.inverse, used.scale)


def _plain(
    x: Tensor, dtype: str, recipe: Recipe, rows: bool, columns: bool, scale: Tensor | None
) -> Quantized:
    """Cast with torch's operators, which torch.compile fuses. Delayed scales are current ones."""
    pair: list[Operand | None] = [None, None]
    used = scale
    for dim, wanted in ((1, rows), (0, columns)):
        if wanted:
            values, inverse = plain_cast(x, dtype, recipe.scaling, dim, used)
            if recipe.one_scale:
                used = 1.0 / inverse
            if dim == 0:
                values, inverse = values.T.contiguous(), inverse.T if inverse.dim() else inverse
            if recipe.scaling == BLOCKWISE:
                inverse = inverse.T.contiguous().T
            pair[1 - dim] = (values, inverse)
    return Quantized(pair[0], pair[1], used)


def _pair(
    rows: Tensor | None,
    row_inverse: Tensor,
    columns: Tensor | None,
    column_inverse: Tensor,
    scale: Tensor | None = None,
) -> Quantized:
    return Quantized(
        None if rows is None else (rows, row_inverse),
        None if columns is None else (columns, column_inverse),
        scale,
    )


def quantize_weights(
    weights: Sequence[Tensor],  # each (rows, d)
    recipe: Recipe,
    transposed: bool = False,
    rows: Tensor | None = None,  # (all rows, d), float8
    columns: Tensor | None = None,  # (d, all rows), float8
    partials: Sequence[Tensor | None] = (),
) -> Quantized:
    """Cast weights that one GEMM reads side by side. Where the recipe has one scale per tensor, all
    of them have the same, and only the operand of the forward GEMM is returned: the rows, or the
    columns of a single weight that is stored transposed. `rows` and `columns` are where the kernels
    write them. `partials` has largest absolute values of parts of each weight, where the optimizer
    has computed them."""
    both = not recipe.one_scale
    known = list(partials) or [None] * len(weights)
    if len(weights) == 1 or both or not kernels_take(*weights):
        joined = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
        return quantize(
            joined,
            E4M3,
            _current(recipe),
            rows=both or not transposed,
            columns=both or transposed,
            partial=known[0] if len(weights) == 1 else None,
            out_rows=rows,
            out_columns=columns,
        )
    from stepscope.kernels.triton import fp8

    total, width = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    rows = fp8.empty((total, width), weights[0], E4M3) if rows is None else rows
    weights = [weight.contiguous() for weight in weights]
    parts_of_all = [
        fp8.amax(weight)[0] if partial is None else partial
        for weight, partial in zip(weights, known, strict=True)
    ]
    used = fp8.scale(torch.cat(parts_of_all), E4M3)
    parts = torch.split(rows, [weight.shape[0] for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        fp8.cast(weight, part, None, E4M3, TENSORWISE, used.scale)
    return Quantized((rows, used.inverse), None, used.scale)


def _current(recipe: Recipe) -> Recipe:
    """Return the recipe of a weight: it is cast once per step, and has current scales."""
    return Recipe(TENSORWISE) if recipe.one_scale else recipe


def scaled_mm(
    a: Operand, b: Operand, dtype: torch.dtype, fast: bool, bias: Tensor | None = None
) -> Tensor:
    """Return a bᵀ plus the bias in that dtype. Both are contracted over their last dimension."""
    (first, inverse), (second, other) = a, b
    # Row-wise GEMMs return bfloat16 only. One block of a row is a row.
    rowwise = inverse.dim() == 2 and inverse.shape[1] == 1
    returned = torch.bfloat16 if rowwise else dtype
    fused = bias if inverse.dim() == 0 and dtype != torch.float32 else None
    out = torch._scaled_mm(
        first,
        second.T,
        scale_a=inverse,
        scale_b=other if inverse.dim() == 0 else other.T,
        bias=fused,
        out_dtype=returned,
        use_fast_accum=fast,
    ).to(dtype)
    return out if bias is None or fused is not None else out.add_(bias)
