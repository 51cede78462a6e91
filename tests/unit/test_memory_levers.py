"""Micro-batches, and optimizer states in host memory, as parts of a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepscope
from stepscope.errors import UsageError
from stepscope.planning.fit import plans_of_step
from stepscope.planning.frontier import MemoryPlan
from stepscope.planning.host_states import HostStates

WIDTH = 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


def square(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def model_and_batch(rows: int = 8) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    return model, torch.optim.AdamW(model.parameters(), 0.01), torch.randn(rows, WIDTH)


def test_states_in_host_memory_give_equal_updates() -> None:
    results = []
    for in_host in (False, True):
        model, optimizer, batch = model_and_batch()
        states = None
        for number in range(4):
            if in_host and number == 1:
                states = HostStates(optimizer)
                assert states.bytes == 2 * sum(
                    p.nbytes for p in model.parameters() if p.nbytes >= 1 << 20
                )
            square(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        if states is not None:
            kept = next(iter(optimizer.state.values()))["exp_avg"]
            states.remove()
            assert next(iter(optimizer.state.values()))["exp_avg"] is not kept
        results.append(([*model.parameters()], optimizer.state_dict()["state"]))
    (parameters, state), (others, other_state) = results
    for one, other in zip(parameters, others, strict=True):
        assert torch.equal(one, other)
    for number, values in state.items():
        for key, value in values.items():
            assert torch.equal(value, other_state[number][key])


@pytest.fixture(autouse=True)
def one_number_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.planning.plans._MICRO_BATCHES", (4,))


def plans(allow: Any, rows: int) -> list[MemoryPlan]:
    model, optimizer, batch = model_and_batch(rows)
    return plans_of_step(model, optimizer, batch, loss_fn=square, allow=allow)


def test_each_permission_makes_smaller_plans() -> None:
    weights = 4 * WIDTH * WIDTH * 4
    rows = 4 * WIDTH
    least = plans((), rows)[-1].peak
    states = plans(("host-states",), rows)[-1]
    parts = plans(("micro-batches",), rows)[-1]
    assert states.host_states == 2 * weights
    assert least - states.peak > weights
    assert parts.micro_batches > 1
    assert parts.peak < least
    wrong: Any = ("states",)
    with pytest.raises(UsageError, match="allow='states'"):
        stepscope.fit(*model_and_batch(), budget="1GiB", loss_fn=square, allow=wrong)


def test_a_step_within_a_budget_trains_as_without() -> None:
    allow: Any = ("micro-batches", "host-states")
    rows = 4 * WIDTH
    model, _, batch = model_and_batch(rows)
    momentum = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    smallest = plans_of_step(model, momentum, batch, loss_fn=square, allow=allow)[-1]
    assert smallest.micro_batches > 1
    assert smallest.host_states
    budget = int(1.03 * smallest.peak)
    parameters = []
    limits: list[dict[str, Any]] = [{}, {"memory": budget, "allow": allow}]
    for options in limits:
        model, _, batch = model_and_batch(rows)
        # Adam would divide gradients of rounding errors by their size.
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        step = stepscope.TrainStep(model, optimizer, loss_fn=square, **options)
        losses = [step(batch) for _ in range(3)]
        parameters.append([*losses, *model.parameters()])
    assert step.fitted is not None
    assert step.fitted.peak * 1.02 <= budget
    assert "micro-batches in a step" in str(step)
    for one, other in zip(*parameters, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(UsageError, match="micro-batches"):
        step(batch[:3])
    step.fitted.undo()
    assert all("forward" not in vars(part) for part in model.modules())
