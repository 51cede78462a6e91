"""What FP8 layers save for backward, and how the backward pass restores the operands of its GEMMs.

With one scale per tensor the columns of a tensor are its transposed rows, so one copy serves both
GEMMs that read it. What another operation saves anyway is not saved a second time in FP8: unit rows
of the norm before the layer, or the output of attention. Casting it again by the scale of the
forward pass gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from stepscope.kernels.fp8.casts import Histories, Operand, Quantized, quantize
from stepscope.kernels.fp8.recipe import BF16, E4M3, FP8, Recipe
from stepscope.kernels.launch import kernels_take
from stepscope.kernels.norm import Normed
from stepscope.kernels.tensor_facts import noted_amax
from stepscope.torch_tools.saved_tensors import is_saved_output


class Layer(NamedTuple):
    """Settings of one FP8 layer."""

    recipe: Recipe
    histories: Histories | None = None


def transposed(operand: Operand) -> Operand:
    """Return the operand of the GEMM that contracts over the other dimension, of a tensor with one
    scale."""
    values, inverse = operand
    if kernels_take(inverse):
        from stepscope.kernels.triton import transpose

        return transpose.transposed(values), inverse
    return values.T.contiguous(), inverse


def weight_to_save(weight: Quantized, layer: Layer) -> Operand:
    """Return what the gradient of the input needs of the weights: with one scale, the operand of
    the forward pass."""
    return weight.operand(rows=layer.recipe.one_scale)


def weight_of_backward(saved: Sequence[Tensor], layer: Layer) -> Operand:
    """Return the operand of the GEMM of the input's gradient."""
    operand = (saved[0], saved[1])
    return transposed(operand) if layer.recipe.one_scale else operand


class LayerInput:
    """The input of a layer, cast for its forward GEMM, and what of it is saved. `learns`: a weight
    needs a gradient. `recomputes`: the backward pass runs the forward GEMM again."""

    def __init__(
        self,
        x: Tensor,  # (..., d)
        normed: Normed | None,
        layer: Layer,
        *,
        learns: bool,
        recomputes: bool = False,
    ) -> None:
        recipe = layer.recipe
        in_fp8 = learns and recipe.weight_gradient == FP8
        source = _source(x, normed)
        if source is None and learns and not in_fp8:
            source = (x,)
        if not recipe.one_scale and in_fp8:
            # Casting again would need another pass for the scales.
            source = None
        casts_again = source is not None and recipe.one_scale
        saves_rows = recomputes and not casts_again
        saves_columns = in_fp8 and source is None and not (saves_rows and recipe.one_scale)
        cast = quantize(
            x.reshape(-1, x.shape[-1]),
            E4M3,
            recipe,
            columns=saves_columns,
            partial=noted_amax(x),
            history=None if layer.histories is None else layer.histories.x,
        )
        self.rows = cast.operand(rows=True)
        groups: list[Sequence[Tensor]] = []
        if source is not None and (learns or recomputes):
            groups.append(source)
            if casts_again:
                assert cast.scale is not None
                groups.append((cast.scale,))
        else:
            source = None
        if saves_rows:
            groups.append(self.rows)
        if saves_columns:
            groups.append(cast.operand(rows=False))
        self.tensors = tuple(tensor for group in groups for tensor in group)
        """The tensors for `save_for_backward`."""
        self.saved = SavedInput(recipe, 0 if source is None else len(source), saves_rows)


class SavedInput:
    """Restores the input of a layer from its saved tensors."""

    def __init__(self, recipe: Recipe, source: int, rows: bool) -> None:
        self._recipe, self._source, self._rows = recipe, source, rows

    def value(self, saved: Sequence[Tensor]) -> Tensor:  # (tokens, d)
        """Return the input in the matmul dtype."""
        source = saved[: self._source]
        x = source[0] if self._source == 1 else _from_unit(*source)
        return x.reshape(-1, x.shape[-1])

    def cast(self, saved: Sequence[Tensor], *, rows: bool, columns: bool) -> Quantized:
        """Return the operands that are needed."""
        if self._source and self._recipe.one_scale:
            scale = saved[self._source]
            x = self.value(saved)
            return quantize(x, E4M3, self._recipe, rows=rows, columns=columns, scale=scale)
        rest = saved[self._source :]
        of_rows = of_columns = None
        if self._rows:
            of_rows, rest = (rest[0], rest[1]), rest[2:]
        if rest:
            of_columns = (rest[0], rest[1])
        elif columns and of_rows is not None:
            of_columns = transposed(of_rows)
        return Quantized(of_rows, of_columns)

    def of_weight_gradient(self, saved: Sequence[Tensor]) -> Tensor | Operand:
        """Return what the gradient of the weight reads: the columns, or the tensor."""
        if self._recipe.weight_gradient == BF16:
            return self.value(saved)
        return self.cast(saved, rows=False, columns=True).operand(rows=False)


def _source(x: Tensor, normed: Normed | None) -> tuple[Tensor, ...] | None:
    """Return what is saved anyway, and from which the input can be computed."""
    if normed is not None and normed.unit is not None:
        assert normed.weight is not None
        return normed.unit, normed.weight
    return (x,) if is_saved_output(x) else None


def _from_unit(unit: Tensor, weight: Tensor) -> Tensor:
    from stepscope.kernels.triton.norm import scaled

    return scaled(unit, weight)


def save(ctx: Any, *groups: Sequence[Tensor]) -> None:
    """Save groups of tensors for backward."""
    ctx.sizes = [len(group) for group in groups]
    ctx.save_for_backward(*(tensor for group in groups for tensor in group))


def restored(ctx: Any) -> list[tuple[Tensor, ...]]:
    """Return the groups that `save` has saved."""
    tensors = iter(ctx.saved_tensors)
    return [tuple(islice(tensors, size)) for size in ctx.sizes]
