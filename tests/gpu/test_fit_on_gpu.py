"""`stepscope.fit` on a GPU: the allocator's peak is below the budget and as predicted."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from stepscope.planning.application import application_of, apply_plan
from stepscope.planning.fit import plans_of_step
from stepscope.planning.host_copies import HostCopies
from stepscope.planning.selective import BlockPlan, apply_to

WIDTH, ROWS = 1024, 8192


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return out


def model_and_batch() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Block() for _ in range(8))))
        batch = torch.randn(ROWS, WIDTH)
    return model, torch.optim.AdamW(model.parameters(), 1e-5, fused=True), batch


def square(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch).float().square().mean()
    return loss


def step(model: nn.Module, batch: Tensor) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = square(model, batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def of_others(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> int:
    """Return the bytes that are not those of the step, such as those of earlier tests."""
    # The workspace of cuBLAS belongs to the step.
    torch._C._cuda_clearCublasWorkspaces()
    states = [x for one in optimizer.state.values() for x in one.values() if isinstance(x, Tensor)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    own = [*model.parameters(), *model.buffers(), *states, *gradients, batch]
    own = [one for one in own if one.is_cuda]
    return torch.cuda.memory_allocated() - sum(-(-one.nbytes // 512) * 512 for one in own)


def peak_of_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> int:
    gc.collect()
    others = of_others(model, optimizer, batch)
    for number in range(3):
        if number == 1:
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = square(model, batch)
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() - others


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_peaks_are_within_the_budget_and_as_predicted(share: float) -> None:
    torch.cuda.empty_cache()
    model, optimizer, batch = model_and_batch()
    options: Any = {"loss_fn": square, "dtype": torch.bfloat16}
    probe = stepscope.fit(model, optimizer, batch, budget="10TiB", **options)
    probe.undo()
    smallest, largest = probe.plans[-1].peak, probe.plans[0].peak
    budget = int(1.03 * (smallest + share * (largest - smallest)))
    fitted = stepscope.fit(model, optimizer, batch, budget=budget, **options)
    peak = peak_of_steps(model, optimizer, batch)
    assert peak <= budget
    assert abs(peak - fitted.peak) < 0.02 * fitted.peak


def test_gradients_are_equal_with_every_plan() -> None:
    model, optimizer, batch = model_and_batch()
    expected = step(model, batch)
    probe = stepscope.fit(
        model, optimizer, batch, budget="10TiB", loss_fn=square, dtype=torch.bfloat16
    )
    for plan in (probe.plans[len(probe.plans) // 2], probe.plans[-1]):
        applied = apply_plan(model, optimizer, application_of(plan))
        for got, wanted in zip(step(model, batch), expected, strict=True):
            assert torch.equal(got, wanted)
        applied.remove()


def test_host_copies_are_read_after_they_were_written() -> None:
    """All blocks copy their inputs and a matmul to host memory, without a wait of the CPU."""
    model, _, batch = model_and_batch()
    expected = step(model, batch)
    copies = HostCopies()
    for block in model[1]:  # type: ignore[index]
        apply_to(block, BlockPlan(True, frozenset({("addmm", 0)}), True, (0,)), copies, None)
    for _ in range(3):
        for got, wanted in zip(step(model, batch), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_compiled_blocks_stay_within_the_budget(share: float) -> None:
    torch.compiler.reset()
    torch.cuda.empty_cache()
    model, optimizer, batch = model_and_batch()
    expected = step(model, batch)
    model.zero_grad()
    for block in model[1]:  # type: ignore[index]
        block.compile()
    options: Any = {"loss_fn": square, "dtype": torch.bfloat16}
    plans = stepscope.fit(model, optimizer, batch, budget="10TiB", **options).plans
    smallest, largest = plans[-1].peak, plans[0].peak
    budget = int(1.03 * (smallest + share * (largest - smallest)))
    fitted = stepscope.fit(model, optimizer, batch, budget=budget, **options)
    for got, wanted in zip(step(model, batch), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=1e-4)
    del got, wanted, expected
    peak = peak_of_steps(model, optimizer, batch)
    assert peak <= budget
    assert abs(peak - fitted.peak) < 0.05 * fitted.peak


@pytest.mark.parametrize("form", ["blocks", "model"])
def test_peaks_of_compiled_models_are_as_predicted(form: Any) -> None:
    torch.compiler.reset()
    torch.cuda.empty_cache()
    model, optimizer, batch = model_and_batch()
    predicted = stepscope.predict(
        model, optimizer, batch, loss_fn=square, dtype=torch.bfloat16, compile=form
    )
    for module in [model] if form == "model" else model[1]:  # type: ignore[index]
        module.compile()
    peak = peak_of_steps(model, optimizer, batch)
    assert abs(peak - predicted.peak.allocated) < 0.05 * peak


def test_a_step_within_a_budget_keeps_optimizer_states_in_host_memory() -> None:
    torch.cuda.empty_cache()
    losses, peaks, limit = [], [], 0
    allow: Any = ("host-states",)
    for budget in (None, 1):
        gc.collect()
        model, optimizer, batch = model_and_batch()
        others = of_others(model, optimizer, batch)
        options: Any = {"loss_fn": square, "dtype": torch.bfloat16}
        if budget is not None:
            plans = plans_of_step(model, optimizer, batch, **options, allow=allow)
            assert plans[-1].host_states
            limit = int(1.03 * plans[-1].peak)
            options |= {"memory": limit, "allow": allow}
        train = stepscope.TrainStep(model, optimizer, **options)
        losses.append([train(batch).item() for _ in range(3)])
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        losses[-1] += [train(batch).item() for _ in range(2)]
        peaks.append(torch.cuda.max_memory_allocated() - others)
        del model, optimizer, train
        gc.collect()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert peaks[1] <= limit < peaks[0]
