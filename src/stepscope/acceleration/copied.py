"""Copies of weights as inputs of a graph: in the matmul dtype, or in FP8.

A region that casts its weights does so in every step, and saves the casts for its backward pass.
Here `WeightCopies` makes them before the region runs: it casts as the region would, or in a
captured step returns what the update of the optimizer has written. The gradient of the copy goes to
the weights in the matmul dtype, and an optimizer-in-backward reads it as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice
from typing import Any

import torch
from torch import Tensor

from stepscope.kernels.fp8.layers import Fp8Layers
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.torch_tools.side_stream import widened_each


@dataclass(frozen=True)
class Copied:
    """Inputs of a graph that are made of weights, which are other inputs."""

    weights: tuple[str, ...]
    """Names of the inputs with the weights, whose rows are in one copy."""
    names: tuple[str, ...]
    """Names of what is made of them."""
    copies: WeightCopies
    dtype: torch.dtype
    fp8: Fp8Layers | None = None
    """Makes copies in FP8: values, their inverse scale, and a tensor that gets the gradient."""
    transposed: bool = False
    """The weight is stored as (d, rows)."""

    def __call__(self, *weights: Tensor) -> tuple[Tensor, ...]:
        return _made((self,), weights)


@dataclass(frozen=True)
class CopiedTogether:
    """Copies of several weights that the same region reads: one node of autograd makes them all."""

    parts: tuple[Copied, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for one in self.parts for name in one.names)

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(name for one in self.parts for name in one.weights)

    def __call__(self, *weights: Tensor) -> tuple[Tensor, ...]:
        return _made(self.parts, weights)


def _made(parts: tuple[Copied, ...], weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    made: Any = _Copy.apply(parts, *weights)  # type: ignore[no-untyped-call]
    return made if isinstance(made, tuple) else (made,)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: tuple[Copied, ...], *weights: Tensor) -> Any:
        ctx.dtypes = [weight.dtype for weight in weights]
        ctx.rows = [weight.shape[0] for weight in weights]
        # Not kept alive: a weight gathered from several ranks is freed before the backward pass.
        ctx.weights = [weakref.ref(weight) for weight in weights]
        ctx.counts = [len(one.weights) for one in parts]
        ctx.ends = list(accumulate(len(one.names) for one in parts))
        ctx.set_materialize_grads(False)
        given = iter(weights)
        pairs = [(one, tuple(islice(given, len(one.weights)))) for one in parts]
        narrow = _narrow([pair for pair in pairs if pair[0].fp8 is None])
        outputs: list[Tensor] = []
        constant: list[Tensor] = []
        for one, of_one in pairs:
            # A new tensor: the copy itself must not become part of this autograd graph.
            made = _in_fp8(one, *of_one) if one.fp8 is not None else [next(narrow).detach()]
            outputs += made
            constant += made[:-1] if of_one[0].requires_grad else made
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        found: list[Tensor | None] = []
        rows = iter(ctx.rows)
        for end, count in zip(ctx.ends, ctx.counts, strict=True):
            gradient, sizes = gradients[end - 1], list(islice(rows, count))
            if count == 1 or gradient is None:
                found += [gradient] * count
            else:
                found += torch.split(gradient, sizes)
        known = [at for at, gradient in enumerate(found) if gradient is not None]
        for dtype in {ctx.dtypes[at] for at in known}:
            same = [at for at in known if ctx.dtypes[at] == dtype]
            pairs = [(ctx.weights[at](), found[at]) for at in same]
            for at, wide in zip(same, widened_each(pairs, dtype), strict=True):  # type: ignore[arg-type]
                found[at] = wide
        return None, *found


def _narrow(pairs: Sequence[tuple[Copied, tuple[Tensor, ...]]]) -> Iterator[Tensor]:
    """Yield the copies of weights in the matmul dtype."""

    def kind(pair: tuple[Copied, tuple[Tensor, ...]]) -> object:
        return id(pair[0].copies), pair[0].dtype, len(pair[1]) == 1

    for _, group in groupby(pairs, kind):
        of_one = list(group)
        first, weights = of_one[0]
        if len(weights) > 1:
            yield from (one.copies.narrow(several, one.dtype)[0] for one, several in of_one)
        else:
            yield from first.copies.narrow_each([weight for _, (weight,) in of_one], first.dtype)


def _in_fp8(one: Copied, weight: Tensor) -> list[Tensor]:
    assert one.fp8 is not None
    operands = one.fp8.operands((weight,), one.copies, one.transposed)
    values, inverse = operands.operand(rows=not one.transposed)
    # Takes the gradient, which has another dtype than the values; nothing reads it.
    slot = torch.empty_strided(weight.shape, (0, 0), dtype=one.dtype, device=values.device)
    return [values.detach(), inverse.detach(), slot]
