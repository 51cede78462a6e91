"""The largest batch that fits into a memory budget, from few predictions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stepscope.analysis.predict.largest import largest_within
from stepscope.errors import UsageError
from stepscope.measure.ledger import line_of_code
from stepscope.planning.fake_run import FakeStep, StepOptions, predict_fake
from stepscope.planning.fake_step import Fakes
from stepscope.planning.fit import fit
from stepscope.planning.other_sizes import largest_batch, resized

WIDTH = 64


@pytest.mark.parametrize("start", [1, 7, 64, 1000])
@pytest.mark.parametrize(("once", "each", "limit"), [(10, 3, 100), (90.5, 0.25, 300), (5, 7, 11)])
def test_a_line_takes_at_most_five_predictions(
    start: int, once: float, each: float, limit: float
) -> None:
    calls: list[int] = []

    def needed(size: int) -> float:
        calls.append(size)
        return once + each * size

    assert largest_within(needed, start, limit) == int((limit - once) / each)
    assert len(calls) <= 5


def test_small_batches_may_need_what_the_update_does() -> None:
    assert largest_within(lambda n: max(100, 10 + 2 * n), 1, 150) == 70
    assert largest_within(lambda n: max(100, 10 + n * n), 3, 300) == 17


def test_nothing_may_fit() -> None:
    assert largest_within(lambda n: 100 + n, 8, 50) == 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def square(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def model_of_blocks() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(Block() for _ in range(3)))
    return model, torch.optim.SGD(model.parameters(), 0.1)


def test_one_more_row_does_not_fit() -> None:
    fakes, options = Fakes(line_of_code), StepOptions(square)
    with fakes.active():
        step = FakeStep.of(fakes, *model_of_blocks(), torch.zeros(128, WIDTH), options)

        def peak(step: FakeStep) -> int:
            return predict_fake(step, steps=1).peak.allocated

        limit = 100 << 20
        rows = largest_batch(step, limit, peak)
        assert rows > 128
        assert peak(resized(step, 0, rows)) <= limit < peak(resized(step, 0, rows + 1))


def test_a_larger_batch_repeats_the_rows_of_the_given_one() -> None:
    """Programs decide by values, such as those of a mask."""
    fakes = Fakes(line_of_code)
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    with fakes.active():
        step = FakeStep.of(fakes, *model_of_blocks(), {"mask": mask, "scale": 2.0}, StepOptions())
        larger = resized(step, 0, 7).batch
        assert larger["mask"].shape == (7, 2)
        assert larger["mask"].sum().item() == 3 + 3 + 1
        assert larger["scale"] == 2.0


def test_a_budget_that_is_too_small_names_the_largest_batch() -> None:
    model, optimizer = model_of_blocks()
    with pytest.raises(UsageError) as raised:
        fit(model, optimizer, torch.zeros(1 << 16, WIDTH), budget="120MiB", loss_fn=square)
    fix = str(raised.value)
    assert "or a batch of " in fix
    rows = int(fix.split("or a batch of ")[1].rstrip(")"))
    assert 1 << 10 < rows < 1 << 16
    fit(model, optimizer, torch.zeros(rows, WIDTH), budget="120MiB", loss_fn=square).undo()
