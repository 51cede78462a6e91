"""The comparison of what is compiled with the original: what it accepts, and when it needs the
original in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepscope.acceleration.checks import Run, difference, differs


class Scaled(nn.Module):
    """Multiplies by a weight, and records the dtypes that it is called with."""

    def __init__(self, dtype: torch.dtype, record: Callable[[torch.dtype], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 256).to(dtype))
        # A comparison restores what belongs to the module.
        self.record = record

    def forward(self, x: Tensor) -> Tensor:
        self.record(x.dtype)
        return x * self.weight


def found(dtype: torch.dtype, factor: float, **more: Any) -> tuple[str, list[torch.dtype]]:
    """Return the difference of a replacement whose result is off by a factor, and the dtypes that
    the original ran in."""
    dtypes: list[torch.dtype] = []
    module = Scaled(dtype, dtypes.append)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    why = difference(
        module,
        module.forward,
        lambda x: (x.double() * module.weight.double() * factor).to(dtype),
        (x,),
        {},
        **more,
    )
    return why, dtypes


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


def compared(
    factor: float, errors: dict[Any, list[float]], kind: str = "block"
) -> tuple[str, bool]:
    """Compare a run of which outputs and gradients are off by a factor, one gradient being that of
    a bias that changes nothing; return the difference, and whether it needed the reference."""
    exact = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    none = 1e-9 * torch.ones(1)
    asked: list[bool] = []

    def reference() -> Run:
        asked.append(True)
        return Run("", [exact], [exact, none])

    expected = Run("", [exact.bfloat16()], [exact.bfloat16(), 2 * none])
    actual = Run("", [(factor * exact).bfloat16()], [(factor * exact).bfloat16(), 2 * none])
    return differs(expected, actual, reference, errors, kind), bool(asked)


def test_the_error_of_a_region_is_assumed_for_others_of_its_kind() -> None:
    errors: dict[Any, list[float]] = {}
    assert compared(1 + 9e-3, errors) == ("", True)
    # The reference showed an error of about 0.2 %.
    assert compared(1 + 9e-3, errors) == ("", False)
    why, asked = compared(1.05, errors)
    assert asked
    assert "relative error 0.05" in why
    # Another kind has its own.
    assert compared(1 + 9e-3, errors, "head") == ("", True)


def test_the_error_of_a_gradient_of_rounding_is_not_assumed() -> None:
    errors: dict[Any, list[float]] = {}
    compared(1 + 9e-3, errors)
    (known,) = errors.values()
    assert known[-1] == 0
    assert all(0 < error < 0.05 for error in known[:-1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_differ(value: float) -> None:
    why, dtypes = found(torch.float32, value)
    assert "the outputs differ" in why
    assert len(dtypes) == 2


def test_infinities_of_a_mask_are_compared_by_position() -> None:
    module = Scaled(torch.float32, [].append)
    mask = torch.zeros(64, 256)
    mask[0, 0] = float("-inf")

    def why(replaced: Tensor, factor: float = 1.0) -> str:
        def original(x: Tensor) -> Tensor:
            return module.forward(x) + mask

        def other(x: Tensor) -> Tensor:
            return factor * module.forward(x) + replaced

        return difference(module, original, other, (torch.ones(64, 256),), {})

    assert why(mask.clone()) == ""
    assert "the outputs differ" in why(mask.clone(), 1.01)
    assert "the outputs differ" in why(mask.roll(1))
    assert "the outputs differ" in why(torch.zeros(64, 256))
