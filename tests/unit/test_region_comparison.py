"""The comparison of compiled regions with those of the original graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import symbolic_trace

from stepscope.acceleration.comparison import Comparison, CompiledPart, Part
from stepscope.acceleration.regions import _with_layout


def traced(run: Callable[[Tensor], Any]) -> Part:
    return Part.of(symbolic_trace(run))


def differences(
    before: Callable[[Tensor], Any] | None, after: Callable[[Tensor], Any]
) -> list[str]:
    original = {} if before is None else {0: traced(before)}
    part = traced(after)
    compiled = {0: CompiledPart(part, after, frozenset({"x"}), 0)}
    return list(Comparison(("x",), original, compiled).differences([draw()]))


def draw() -> Tensor:
    return torch.linspace(-1, 1, 7, requires_grad=True)


def test_equal_regions_do_not_differ() -> None:
    assert differences(lambda x: (x.exp(),), lambda x: (x.exp(),)) == []


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        (lambda x: (1.01 * x.exp(),), "outputs"),
        (lambda x: ((x + 0.1 * (x - x.detach())).exp(),), "gradients"),
    ],
)
def test_wrong_values_and_wrong_gradients_differ(after: Callable[[Tensor], Any], kind: str) -> None:
    part = traced(lambda x: (x.exp(),))
    compiled = {0: CompiledPart(part, after, frozenset({"x"}), 0)}
    (why,) = Comparison(("x",), {0: part}, compiled).differences([draw()])
    assert f"the {kind} differ" in why


@pytest.mark.parametrize("before", [lambda x: (x.exp(),), None])
def test_a_region_with_other_outputs_is_not_taken_for_compared(
    before: Callable[[Tensor], Any] | None,
) -> None:
    (why,) = differences(before, lambda x: (x.exp(), x.sin()))
    assert "does not return" in why


@pytest.mark.parametrize("cast", [lambda x: x.to(torch.bfloat16), lambda x: x.bfloat16()])
def test_the_reference_has_no_casts(cast: Callable[[Tensor], Tensor]) -> None:
    """A region may be more exact than the original, and is then near the reference."""

    def before(x: Tensor) -> Any:
        y = cast(x)
        for _ in range(40):
            y = (y * 1.01) / 1.01
        return (y.float().exp(),)

    assert differences(before, lambda x: (x.exp(),)) == []
    (why,) = differences(before, lambda x: ((0.9 * x).exp(),))
    assert "differ" in why


def test_outputs_have_the_layout_of_the_trace() -> None:
    """Inductor may pad the rows of a matmul; other regions rely on the traced strides."""
    expected = torch.empty(4, 5), torch.empty(5, 4).T
    padded = torch.zeros(4, 8)[:, :5]
    run = _with_layout(lambda: (padded, padded), expected, single=False)
    assert [x.stride() for x in run()] == [(5, 1), (8, 1)]
    single = _with_layout(lambda: (padded,), expected[:1], single=True)
    assert single().stride() == (5, 1)
