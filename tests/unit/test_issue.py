"""Host issue time of each phase of a step."""

from __future__ import annotations

import threading
from itertools import count

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from stepscope.advisor.scope import issue
from stepscope.advisor.scope.issue import OPTIMIZER, OUTSIDE, IssueClock


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clock that advances by one second at each read."""
    seconds = count()
    monkeypatch.setattr(issue.time, "perf_counter", lambda: float(next(seconds)))


@pytest.mark.usefixtures("ticking")
def test_phases_of_a_step_with_two_forwards() -> None:
    idle: list[str] = []
    clock = IssueClock(lambda: idle.append("idle"))
    model = torch.nn.Linear(2, 2)
    hooks = clock.hooked([model])
    assert hooks is not None
    with hooks:
        for _ in range(2):
            clock.begin()
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
            with torch.no_grad():
                model(torch.ones(1, 2))
            clock.turn(OPTIMIZER)
            clock.turn(OUTSIDE)
            clock.end()
    # The wait for the device lies between two reads of the clock and counts for no phase.
    expected = {"outside": 4e3, "data": 0, "forward": 2e3, "backward": 2e3, "optimizer": 1e3}
    assert clock.steps == [expected] * 2
    assert len(idle) == 2 * 10
    model(torch.ones(1, 2))
    clock.turn(OPTIMIZER)
    assert len(idle) == 2 * 10, "nothing is timed outside of a step"


def test_reading_the_loss_after_the_backward_waits_for_an_idle_device() -> None:
    """Otherwise the wait for the device would count as issue time of the backward."""
    log: list[str] = []
    clock = IssueClock(lambda: log.append("idle"))
    model = torch.nn.Linear(2, 2)
    hooks = clock.hooked([model])
    assert hooks is not None
    with hooks:
        clock.begin()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        log.append("item")
        assert clock._phase == OUTSIDE
        clock.turn(OPTIMIZER)
        clock.end()
    assert log == ["idle", "idle", "idle", "idle", "item", "idle", "idle"]
    assert torch.Tensor.backward.__module__ == "torch._tensor"


@pytest.mark.usefixtures("ticking")
def test_loading_time_is_a_separate_phase() -> None:
    clock = IssueClock(lambda: None)
    model = torch.nn.Linear(2, 2)
    batches = iter(DataLoader(TensorDataset(torch.ones(3, 2)), batch_size=1))
    plain = type(batches).__next__
    for _ in range(2):
        hooks = clock.hooked([model])
        assert hooks is not None
        with hooks:
            clock.begin()
            (batch,) = next(batches)
            model(batch)
            next(batches, None)
            clock.end()
    assert [step["data"] for step in clock.steps] == [2e3, 2e3], "also when there is none left"
    assert [step["outside"] for step in clock.steps] == [2e3, 2e3]
    assert [step["backward"] for step in clock.steps] == [2e3, 2e3]
    assert type(batches).__next__ is plain


def test_prefetching_thread_is_not_counted() -> None:
    clock = IssueClock(lambda: None)
    model = torch.nn.Linear(2, 2)
    batches = iter(DataLoader(TensorDataset(torch.ones(3, 2)), batch_size=1))
    hooks = clock.hooked([model])
    assert hooks is not None
    with hooks:
        clock.begin()
        other = threading.Thread(target=next, args=(batches,))
        other.start()
        other.join()
        assert clock._phase == OUTSIDE
        clock.end()
    assert clock.steps[0]["data"] == 0


def test_model_that_is_compiled_in_place_has_no_hooks() -> None:
    model = torch.nn.Linear(2, 2)
    model.compile()
    clock = IssueClock(lambda: None)
    assert clock.hooked([model]) is None
    assert clock.hooked([]) is None
