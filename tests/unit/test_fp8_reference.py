"""FP8 recipes and the plain PyTorch reference of FP8 linear layers."""

from __future__ import annotations

import math

import pytest
import torch

from stepscope.errors import UsageError
from stepscope.kernels.fp8.recipe import (
    BF16,
    BLOCKWISE,
    DELAYED,
    E4M3,
    E5M2,
    LARGEST,
    ROWWISE,
    SCALINGS,
    TENSORWISE,
    Recipe,
    recipe_of,
    shape_refused,
    unavailable,
)
from stepscope.kernels.fp8.reference import (
    DTYPES,
    DelayedScales,
    amax_of,
    cast,
    counts,
    fp8_linear_reference,
    scale_of,
)


def test_largest_values_are_those_of_the_dtypes() -> None:
    for name, dtype in DTYPES.items():
        assert torch.finfo(dtype).max == LARGEST[name]


def test_unknown_settings_are_refused() -> None:
    for wrong in ({"scaling": "x"}, {"gradient_dtype": "fp8"}, {"history": 0}):
        with pytest.raises(UsageError):
            Recipe(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="blockwise"):
        Recipe(BLOCKWISE, gradient_dtype=E5M2)
    assert recipe_of("rowwise") == Recipe(ROWWISE)
    assert recipe_of(None) == Recipe()


def test_devices_and_shapes_without_fp8_have_a_reason() -> None:
    assert "NVIDIA" in (unavailable("cpu") or "")
    assert shape_refused(32, 64, 128) is None
    assert shape_refused(None, 64, 128) is None
    assert "in_features=40" in (shape_refused(32, 40, 128) or "")
    assert "tokens=17" in (shape_refused(17, 48, 128) or "")


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scale_of_is_safe(dtype: str) -> None:
    amax = torch.tensor([0.0, 1e-45, 2.0, 3e38, math.inf, math.nan])
    scale = scale_of(amax, dtype)
    assert scale[0] == 1
    assert scale[2] == LARGEST[dtype] / 2
    assert scale[:4].isfinite().all()
    assert (scale[:4] > 0).all()
    assert (1 / scale[:4]).isfinite().all()
    assert (1 / scale[:4] > 0).all()
    assert scale[4:].isnan().all()
    # Larger than float32: limited, and its values saturate.
    assert scale_of(torch.tensor(1e300, dtype=torch.float64), dtype) > 0


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_nonfinite_values_stay_visible_and_local(dtype: str) -> None:
    x = torch.randn(4, 32)
    x[1, 3], x[2, 5], x[3, 0] = math.nan, math.inf, -math.inf
    result = cast(x, dtype)
    back = result.dequantized()
    finite = x.isfinite()
    assert (back.isfinite() == finite).all()
    rounding = 0.07 if dtype == E4M3 else 0.14
    smallest = result.inverse_scale * torch.finfo(DTYPES[dtype]).tiny
    torch.testing.assert_close(back[finite], x[finite], rtol=rounding, atol=float(smallest))


def test_counts_of_saturation_and_underflow() -> None:
    x = torch.tensor([[1000.0, 448.0, 463.0, 465.0, 1e-9, 0.0, -500.0, 1.0]])
    assert counts(x, cast(x, E4M3, scale=torch.tensor(1.0)), E4M3) == (3, 1)
    zeros = torch.zeros(2, 16)
    of_zeros = cast(zeros)
    assert counts(zeros, of_zeros).underflowed == 0
    assert torch.equal(of_zeros.dequantized(), zeros)
    # The scale of tiny values is limited: float32 could not represent it.
    assert cast(torch.full((2, 16), 1e-37)).inverse_scale > 0
    # With its own amax nothing saturates, although amax times scale may round above the largest.
    own = torch.rand(1000, 1) * 10
    assert counts(own, cast(own, scaling=ROWWISE, dim=1)).saturated == 0


def test_groups_of_each_scaling() -> None:
    x = torch.arange(1.0, 1 + 130 * 260).view(130, 260)
    assert amax_of(x).shape == ()
    assert amax_of(x, ROWWISE, 1).shape == (130, 1)
    assert amax_of(x, ROWWISE, 0).shape == (1, 260)
    assert amax_of(x, BLOCKWISE, 1).shape == (130, 3)
    assert amax_of(x, BLOCKWISE, 0).shape == (2, 260)
    assert amax_of(x, BLOCKWISE, 1)[129, 2] == x[129, 259]
    assert amax_of(x, BLOCKWISE, 0)[0, 259] == x[127, 259]
    for scaling, dim in ((ROWWISE, 0), (BLOCKWISE, 0), (BLOCKWISE, 1)):
        back = cast(x, E4M3, scaling, dim).dequantized()
        torch.testing.assert_close(back, x, rtol=0.0626, atol=1.0)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("weight_gradient", ["fp8", BF16])
def test_reference_is_close_to_exact_in_forward_and_backward(
    scaling: str, weight_gradient: str
) -> None:
    recipe = Recipe(scaling, weight_gradient=weight_gradient)
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64).requires_grad_()
        for shape in ((2, 64, 256), (160, 256), (160,))
    )
    grad = torch.randn(2, 64, 160, dtype=torch.float64)
    scales = DelayedScales.of(recipe) if scaling == DELAYED else None
    out = fp8_linear_reference(x, weight, bias, recipe=recipe, scales=scales)
    exact = torch.nn.functional.linear(x, weight, bias)
    actual = torch.autograd.grad(out, (x, weight, bias), grad)
    truth = torch.autograd.grad(exact, (x, weight, bias), grad)
    assert torch.equal(actual[2], truth[2])
    for one, other in ((out, exact), *zip(actual[:2], truth[:2], strict=True)):
        relative = ((one - other).norm() / other.norm()).item()
        # Two roundings to 4 bits, each with a relative RMS error of about 2.6 %.
        assert 1e-4 < relative < 0.045


def test_delayed_scales_follow_the_history() -> None:
    recipe = Recipe(DELAYED, history=2)
    scales = DelayedScales.of(recipe).x
    values = [scales.scale(torch.full((1, 1), v), E4M3).item() for v in (4.0, 8.0, 1.0, 1.0, 0.0)]
    # First its own, then the largest of the last two.
    assert values == [448 / 4, 448 / 4, 448 / 8, 448 / 8, 448 / 1]
    with pytest.raises(ValueError, match="histories"):
        fp8_linear_reference(torch.ones(1, 16), torch.ones(16, 16), recipe=recipe)


def test_tensorwise_outputs_have_the_dtypes_of_their_inputs() -> None:
    x = torch.randn(3, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(48, 32, requires_grad=True)
    out = fp8_linear_reference(x, weight, recipe=Recipe(TENSORWISE, gradient_dtype=E5M2))
    out.float().square().sum().backward()
    assert (out.dtype, out.shape) == (torch.bfloat16, (3, 16, 48))
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
