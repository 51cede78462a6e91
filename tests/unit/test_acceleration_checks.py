"""The comparison of a replacement with the original: what it accepts, and when it needs the
original in float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepscope.acceleration.checks import Alike, difference


class Scaled(nn.Module):
    """Multiplies by a weight, and records the dtypes that it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 256).to(dtype))
        # Not a list: a comparison restores it.
        self.seen = SimpleNamespace(dtypes=[])

    def forward(self, x: Tensor) -> Tensor:
        self.seen.dtypes.append(x.dtype)
        return x * self.weight


def found(dtype: torch.dtype, factor: float, **more: Any) -> tuple[str, list[torch.dtype]]:
    """Return the difference of a replacement whose result is off by a factor, and the dtypes that
    the original ran in."""
    module = Scaled(dtype)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    x.requires_grad_()
    why = difference(
        module,
        module.forward,
        lambda x: (x.double() * module.weight.double() * factor).to(dtype),
        (x,),
        {},
        **more,
    )
    return why, module.seen.dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_that_agree_need_no_reference(dtype: torch.dtype) -> None:
    assert found(dtype, 1.0) == ("", [dtype])


def test_a_reference_decides_about_larger_differences() -> None:
    # Twice the error of bfloat16 is more than the difference that is always accepted.
    why, dtypes = found(torch.bfloat16, 1 + 9e-3)
    assert (why, dtypes) == ("", [torch.bfloat16, torch.float32])
    why, dtypes = found(torch.bfloat16, 1.05)
    assert "relative error 0.05" in why
    assert dtypes == [torch.bfloat16, torch.float32]
    why, _ = found(torch.float32, 1 + 1e-4)
    assert "relative error 0.0001" in why


def test_a_tolerance_is_accepted_without_a_reference() -> None:
    assert found(torch.bfloat16, 1.05, tolerance=0.1) == ("", [torch.bfloat16])
    assert "the outputs differ" in found(torch.bfloat16, 1.3, tolerance=0.1)[0]


def test_the_error_of_a_layer_is_assumed_for_others_of_its_kind() -> None:
    alike = Alike()
    both = [torch.bfloat16, torch.float32]
    assert found(torch.bfloat16, 1 + 9e-3, alike=alike) == ("", both)
    # The reference showed an error of about 0.2 %.
    assert found(torch.bfloat16, 1 + 9e-3, alike=alike) == ("", [torch.bfloat16])
    why, dtypes = found(torch.bfloat16, 1.05, alike=alike)
    assert "relative error 0.05" in why
    assert dtypes == both
    # Another dtype is another kind.
    assert "relative error" in found(torch.float32, 1 + 1e-3, alike=alike)[0]


class Shifted(nn.Module):
    """Adds a bias that changes nothing: its gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x + self.bias, -1)


def test_the_error_of_a_gradient_of_rounding_is_not_assumed() -> None:
    module, alike = Shifted(), Alike()
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()

    def replaced(x: Tensor) -> Tensor:
        return (torch.softmax((x + module.bias).float(), -1) * 1.009).bfloat16()

    assert (
        difference(module, module.forward, replaced, (x.requires_grad_(),), {}, alike=alike) == ""
    )
    (errors,) = alike.errors.values()
    assert errors[-1] == 0
    assert all(0 < error < 0.05 for error in errors[:-1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_differ(value: float) -> None:
    why, dtypes = found(torch.float32, value)
    assert "the outputs differ" in why
    assert len(dtypes) == 2


def test_infinities_of_a_mask_are_compared_by_position() -> None:
    module = Scaled(torch.float32)
    mask = torch.zeros(64, 256)
    mask[0, 0] = float("-inf")

    def why(replaced: Tensor, factor: float = 1.0) -> str:
        def original(x: Tensor) -> Tensor:
            return module.forward(x) + mask

        def other(x: Tensor) -> Tensor:
            return factor * module.forward(x) + replaced

        return difference(module, original, other, (torch.ones(64, 256),), {}, gradients=False)

    assert why(mask.clone()) == ""
    assert "the outputs differ" in why(mask.clone(), 1.01)
    assert "the outputs differ" in why(mask.roll(1))
    assert "the outputs differ" in why(torch.zeros(64, 256))
