"""The comparison of compiled regions with those of the original graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import symbolic_trace

from stepscope.acceleration.comparison import Comparison, CompiledPart, Part


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
