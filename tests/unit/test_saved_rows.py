"""A saved optimizer state is resharded."""

from __future__ import annotations

import pytest
import torch

from stepscope.parallel import ParallelError
from stepscope.parallel.reshard import Saved, Span, concatenated

FULL = torch.arange(30.0).view(10, 3)


def parts(*bounds: int) -> list[tuple[Saved, torch.Tensor]]:
    spans = [Span(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True)]
    return [(Saved(4, span, "exp_avg"), span.of(FULL)) for span in spans]


@pytest.mark.parametrize("rows", [None, Span(0, 10), Span(2, 3), Span(3, 9)])
@pytest.mark.parametrize("bounds", [(0, 10), (5, 10, 0, 5), (0, 1, 1, 8, 8, 10)])
def test_rows_come_from_the_parts_that_contain_them(rows: Span | None, bounds: list[int]) -> None:
    matching = [part for part in parts(*bounds) if part[0].meets(rows)]
    assert torch.equal(concatenated(rows, matching), rows.of(FULL) if rows else FULL)


def test_rows_of_a_full_state_and_state_without_rows() -> None:
    saved = Saved(4, None, "exp_avg")
    assert torch.equal(concatenated(Span(2, 5), [(saved, FULL)]), FULL[2:5])
    # Not of the parameter's shape, which an optimizer of full parameters may store.
    assert concatenated(None, [(saved, FULL[:, :1])]).shape == (10, 1)
    assert concatenated(Span(0, 5), [(Saved(4, Span(0, 5), "step"), torch.tensor(7.0))]) == 7.0


def test_missing_rows_are_reported() -> None:
    with pytest.raises(ParallelError, match="exp_avg of parameter 4 lacks rows 3 to 6"):
        concatenated(Span(2, 6), parts(0, 3, 6, 10))


@pytest.mark.parametrize("name", ["12.exp_avg", "3[0:5].exp_avg", "0.step"])
def test_names_are_read_back(name: str) -> None:
    assert Saved.parse(name).name == name


def test_a_name_of_another_form_is_rejected() -> None:
    with pytest.raises(ParallelError, match=r"group0\.float32\.exp_avg, written by another form"):
        Saved.parse("group0.float32.exp_avg")
