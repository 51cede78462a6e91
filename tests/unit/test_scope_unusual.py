"""`stepscope.Scope` around unusual steps: it does not affect them and reports what is missing."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import stepscope
from stepscope.advisor.inspect.progress import read_progress
from stepscope.errors import StepscopeError
from stepscope.measure.device import Timestamp
from stepscope.measure.flops import FlopCount
from stepscope.records.memory import GRADIENTS
from stepscope.records.schema import Record
from stepscope.views.program.rows import ProgramRecord
from watched_models import Network, batch, network, network_flops, train
from watched_programs import watching

STEPS = 8
"""1 warm-up, 2 timed, 1 counted, 1 lead-in, 2 traced, and one more."""


class PlannedError(Exception):
    pass


def raise_after(step: Callable[[], object]) -> None:
    step()
    raise PlannedError


def scoped(
    step: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer
) -> stepscope.Scope:
    scope = stepscope.Scope(model, optimizer, warmup=1, timed=2, traced=2)
    for _ in range(STEPS):
        with scope.step():
            step()
    return scope


def is_complete(record: Record) -> bool:
    watched = ProgramRecord(record)
    return watched.summary is not None and watched.account is not None


def test_model_saved_in_every_step_loads_without_stepscope() -> None:
    model, optimizer = network()
    files: list[bytes] = []

    def step() -> None:
        train(model, optimizer)
        written = io.BytesIO()
        torch.save(model, written)
        files.append(written.getvalue())

    scope = scoped(step, model, optimizer)
    assert len(files) == STEPS
    assert not any(b"stepscope" in data for data in files)
    x, _ = batch()
    for data in files:
        loaded = torch.load(io.BytesIO(data), weights_only=False)
        assert loaded(x).shape == model(x).shape
    assert torch.equal(loaded(x), model(x))
    assert is_complete(scope.record())


def test_copy_of_the_model_runs_unobserved() -> None:
    model, optimizer = network()
    copies: list[Network] = []

    def step() -> None:
        train(model, optimizer)
        copies.append(copy.deepcopy(model))
        x, y = batch()
        for one in copies:
            nn.functional.cross_entropy(one(x), y).backward()

    scope = scoped(step, model, optimizer)
    record = scope.record()
    assert is_complete(record)
    assert ProgramRecord(record).micro_batches == 1
    assert not any(part._forward_hooks for part in model.modules())
    copy.deepcopy(optimizer)
    again = copy.deepcopy(copies[-1])
    x, _ = batch()
    assert torch.equal(again(x), copies[-1](x))


def per_sample(model: nn.Module, rows: int = 8) -> None:
    weights = {name: value.detach() for name, value in model.named_parameters()}
    x, y = batch(rows)

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    result = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    assert result["head.weight"].shape == (rows, *weights["head.weight"].shape)


def hooks_of_torch() -> tuple[Any, Any]:
    autograd: Any = torch._C._autograd
    return autograd._saved_tensors_hooks_disable, autograd._top_saved_tensors_default_hooks(True)


def test_torch_func_gradients_disable_the_memory_ledger() -> None:
    model, optimizer = network()
    before = hooks_of_torch()

    def step() -> None:
        per_sample(model)
        train(model, optimizer)

    record = scoped(step, model, optimizer).record()
    assert hooks_of_torch() == before
    watched = ProgramRecord(record)
    assert watched.summary is not None
    assert watched.account is None
    assert "torch.func.grad" in record.notes["memory_missing"]
    flops = record.quantity("flops")
    assert flops is not None
    assert flops > network_flops(8)
    assert (record.quantity("peak_bytes") or 0) > 0


def test_hooks_for_saved_tensors_are_gone_after_a_step_that_raised() -> None:
    model, optimizer = network()
    before = hooks_of_torch()
    scope = stepscope.Scope(model, optimizer, warmup=0, timed=1, traced=1)
    with scope.step():
        train(model, optimizer)
    for gone_wrong in (lambda: per_sample(model), lambda: model(batch()[0])):
        with pytest.raises(PlannedError), scope.step():
            raise_after(gone_wrong)
        assert hooks_of_torch() == before
    own = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with pytest.raises(RuntimeError, match="saved tensor hooks"), scope.step(), own:
        per_sample(model)
    assert hooks_of_torch() == before


def test_sparse_gradients_are_counted_by_their_parts() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())

    def step() -> None:
        model(torch.randint(10, (5,))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    record = scoped(step, model, optimizer).record()
    assert is_complete(record)
    account = ProgramRecord(record).account
    assert account is not None
    # Five rows of four values, and the index of each row.
    optimizing = next(peak for peak in account.phases if peak.phase == "optimizer")
    assert optimizing.lines[GRADIENTS] == 5 * 4 * 4 + 5 * 8


def test_failed_count_ends_only_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise TypeError("planned\nand explained")

    monkeypatch.setattr(FlopCount, "add", fails)
    model, optimizer = network()
    record = scoped(lambda: train(model, optimizer), model, optimizer).record()
    assert record.notes["memory_missing"] == "the count failed (TypeError: planned)"
    assert "recording_failed" not in record.notes
    watched = ProgramRecord(record)
    assert watched.summary is not None
    assert watched.account is None
    assert record.quantity("flops") is None


def test_rows_of_different_lengths_have_no_size() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        rows = [torch.randn(2, 4), torch.randn(3, 4)]
        output = model(torch.nested.nested_tensor(rows, layout=torch.jagged))
        output.values().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    account = ProgramRecord(scoped(step, model, optimizer).record()).account
    assert account is not None
    (between,) = [saved for saved in account.saved if saved.module == "1"]
    assert between.shape == (2, -1, 4)
    assert between.bytes == 5 * 4 * 4


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_cause_of_a_failed_recording_is_reported(tmp_path: Path) -> None:
    model = torch.jit.script(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.randn(4, 4)).pow(2).mean().backward()
        optimizer.step()

    with pytest.raises(StepscopeError, match=r"recording failed: .*hook"):
        scoped(step, model, optimizer).record()
    with watching(tmp_path):
        for _ in range(16):
            step()
    assert "hook" in read_progress(tmp_path).failure


def loop_that_raises(scope: stepscope.Scope, step: Callable[[], object], steps: int) -> None:
    """Run a loop in which every second step raises before it does anything."""
    for number in range(steps):
        try:
            with scope.step():
                if number % 2:
                    raise PlannedError
                step()
        except PlannedError:
            assert number % 2


def test_step_that_raises_is_not_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = network()
    scope = stepscope.Scope(model, optimizer, warmup=2, timed=4, traced=1)
    steps_done = 0

    def step() -> None:
        nonlocal steps_done
        steps_done += 1
        train(model, optimizer)

    # One second per completed step.
    monkeypatch.setattr(scope._recorder.device, "mark", lambda: Timestamp(float(steps_done)))
    loop_that_raises(scope, step, 16)
    record = scope.record()
    series = record.find("step")
    assert series is not None
    assert series.values == (1e3,) * 4
    assert series.warmup == (1e3,) * 2
    assert len(record.readings) == 2
    assert ProgramRecord(record).account is not None


def test_trace_restarts_after_a_step_that_raised() -> None:
    model, optimizer = network()
    scope = stepscope.Scope(model, optimizer, warmup=0, timed=1, traced=2, memory=False)
    # Timed, lead-in, traced; steps that raise, and the entire trace again.
    for _ in range(3):
        with scope.step():
            train(model, optimizer)
    with pytest.raises(PlannedError), scope.step():
        raise_after(lambda: train(model, optimizer))
    assert not any(part._forward_hooks for part in model.modules())
    for _ in range(3):
        with scope.step():
            train(model, optimizer)
    assert scope.done
    watched = ProgramRecord(scope.record())
    assert watched.summary is not None
    assert len(watched.summary.steps) == 2
    assert watched.micro_batches == 1


def test_counting_and_tracing_give_up_on_steps_that_always_raise() -> None:
    model, optimizer = network()
    scope = stepscope.Scope(model, optimizer, warmup=0, timed=1, traced=1)
    with scope.step():
        train(model, optimizer)
    for _ in range(6):
        with pytest.raises(StopIteration), scope.step():
            next(iter(()))
    assert scope.done
    notes = scope.record().notes
    assert "raised" in notes["memory_missing"]
    assert "raised" in notes["trace_missing"]
