"""The FP8 casts of the kernels are those of the plain PyTorch reference, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stepscope.kernels.fp8.casts import History, quantize, quantize_weights
from stepscope.kernels.fp8.recipe import (
    BLOCKWISE,
    DELAYED,
    E4M3,
    E5M2,
    LARGEST,
    ROWWISE,
    SCALINGS,
    TENSORWISE,
    Recipe,
)
from stepscope.kernels.fp8.reference import DTYPES, cast, counts, scale_of
from stepscope.kernels.tensor_facts import note_amax, noted_amax
from stepscope.kernels.triton import fp8
from stepscope.torch_tools.triton_available import is_interpreted

DEVICE = torch.device("cpu" if is_interpreted() else "cuda")
SHAPE = (144, 272)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    # Many binades, so that every rounding of the dtypes occurs, subnormal numbers too.
    return (x * torch.exp2(torch.randint(-14, 8, shape, generator=generator))).to(DEVICE)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_casts_have_the_bits_of_the_reference(scaling: str, dtype: str) -> None:
    if scaling == BLOCKWISE and dtype == E5M2:
        pytest.skip("blockwise GEMMs take e4m3 only")
    x = draw(*SHAPE)
    x[3, 5], x[70, 200], x[143, 271], x[0, 0] = math.nan, math.inf, -math.inf, 0.0
    gradients = E4M3 if scaling == BLOCKWISE else dtype
    actual = quantize(x, dtype, Recipe(scaling, gradient_dtype=gradients))
    for rows, dim in ((True, 1), (False, 0)):
        values, inverse = actual.operand(rows=rows)
        expected = cast(x, dtype, scaling, dim)
        wanted, wanted_inverse = expected.values, expected.inverse_scale
        if not rows:
            wanted, wanted_inverse = wanted.T.contiguous(), wanted_inverse.T
        nan = wanted.float().isnan()
        assert nan.sum() == 3
        assert torch.equal(values.float().isnan(), nan)
        assert torch.equal(bits(values)[~nan], bits(wanted)[~nan])
        assert torch.equal(inverse.contiguous(), wanted_inverse.contiguous())


def test_every_value_of_a_dtype_and_every_tie_rounds_as_in_torch() -> None:
    for name, dtype in DTYPES.items():
        codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        finite = codes[codes.isfinite()].sort().values.unique()
        ties = (finite[1:] + finite[:-1]) / 2
        beyond = torch.tensor([LARGEST[name] * 2, -LARGEST[name] * 3])
        x = torch.cat([finite, ties, torch.nextafter(ties, ties + 1), beyond])
        x = torch.nn.functional.pad(x, (0, -len(x) % 16)).view(1, -1).to(DEVICE)
        one = torch.ones((), device=DEVICE)
        counter = torch.zeros((), dtype=torch.int32, device=DEVICE)
        values = torch.empty_like(x, dtype=dtype)
        fp8.cast(x, values, None, name, TENSORWISE, one, saturated=counter)
        expected = cast(x, name, scale=one)
        # The sign of zero is of no consequence.
        assert torch.equal(values.float(), expected.values.float())
        assert counter.item() == counts(x, expected, name).saturated == 2


@pytest.mark.parametrize("scaling", [TENSORWISE, ROWWISE, BLOCKWISE])
def test_zeros_and_extreme_values_scale_safely(scaling: str) -> None:
    x = torch.zeros(32, 144, device=DEVICE)
    for value in (0.0, 1e-42, 3e38):
        x[5] = value
        for rows in (True, False):
            values, inverse = quantize(x, E4M3, Recipe(scaling)).operand(rows=rows)
            assert values.float().isfinite().all()
            assert inverse.isfinite().all()
            assert (inverse > 0).all()
            assert bool(values.float().any()) == (value > 1e-40)


def test_casts_are_repeatable_and_take_strided_rows() -> None:
    wide = draw(32, 96)
    x = wide[:, 16:80]
    first, second = (quantize(x, E4M3, Recipe()) for _ in range(2))
    packed = quantize(x.contiguous(), E4M3, Recipe())
    for other in (second, packed):
        for rows in (True, False):
            for a, b in zip(first.operand(rows), other.operand(rows), strict=True):
                assert torch.equal(a.float(), b.float())


def test_a_noted_amax_replaces_the_pass_over_the_values() -> None:
    x = note_amax(draw(16, 32), torch.tensor([1.0, 4.0, 2.0], device=DEVICE))
    values, inverse = quantize(x, E4M3, Recipe(), partial=noted_amax(x)).operand(rows=True)
    scale = scale_of(torch.tensor(4.0, device=DEVICE), E4M3)
    assert torch.equal(inverse, 1 / scale)
    assert torch.equal(bits(values), bits(cast(x, scale=scale).values))
    x.mul_(2)
    assert noted_amax(x) is None


def test_delayed_scales_come_from_earlier_steps() -> None:
    history = History(3, DEVICE)
    recipe = Recipe(DELAYED, history=3)
    used = []
    for largest in (2.0, 8.0, 1.0, 1.0, 1.0, 1.0):
        x = torch.full((16, 16), largest, device=DEVICE)
        _, inverse = quantize(x, E4M3, recipe, history=history).operand(rows=True)
        used.append(round(448 * inverse.item(), 4))
    assert used == [2.0, 2.0, 8.0, 8.0, 8.0, 1.0]


@pytest.mark.parametrize("scaling", [TENSORWISE, ROWWISE, BLOCKWISE])
def test_weights_side_by_side_are_cast_as_one(scaling: str) -> None:
    weights = [draw(rows, 144, seed=rows) for rows in (48, 32, 144)]
    recipe = Recipe(scaling)
    together, joined = quantize_weights(weights, recipe), quantize(torch.cat(weights), E4M3, recipe)
    # With one scale the columns are the transposed rows.
    assert (together.columns is None) == recipe.one_scale
    for rows in (True, False)[: 1 if recipe.one_scale else 2]:
        for a, b in zip(together.operand(rows), joined.operand(rows), strict=True):
            assert torch.equal(a.float(), b.float())
