"""`stepscope.fit`: plans within a memory budget, their predictions, and equal gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from stepscope.acceleration.forward_registry import layer_owners
from stepscope.analysis.predict.sizes import bytes_of
from stepscope.errors import StepscopeError, UsageError
from stepscope.measure.ledger import StorageLedger, line_of_code
from stepscope.planning.application import application_of, apply_plan
from stepscope.planning.blocks import repeated_blocks, structures
from stepscope.planning.fake_run import FakeStep, StepOptions
from stepscope.planning.fake_step import Fakes
from stepscope.planning.frontier import MemoryPlan
from stepscope.planning.host_copies import HostCopies
from stepscope.planning.operators import known_rates
from stepscope.planning.plans import plans_of
from stepscope.planning.selective import BlockPlan, apply_to
from stepscope.planning.simulated_bytes import WORKSPACE
from stepscope.records.memory import ROUNDING

WIDTH, ROWS = 128, 512


class Mlp(nn.Module):
    """A block with dropout, an operator in place, and a head that is tied to the embedding."""

    def __init__(self, index: int, rate: float = 0.1) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(functional.relu_(self.up(self.norm(x)))))
        return out


class Tied(nn.Module):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Mlp(index, rate) for index in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.linear(x, self.embedding.weight).logsumexp(-1).mean()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.relu(self.norm(self.convolution(x)), inplace=True)


class Attending(nn.Module):
    """Blocks with keyword arguments, a mask, and two outputs."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(-2, -3) for t in self.qkv(x).chunk(3, -1))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(y.transpose(-2, -3).flatten(-2)) * scale, scale

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        for block in self.blocks:
            x, scale = block(x, scale=scale)
        return x


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 4)


def square(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


Case = tuple[Callable[[], nn.Module], Tensor, Any]
CASES: dict[str, Case] = {
    "tied": (Tied, torch.arange(ROWS).remainder(64).view(4, -1), None),
    "encoder": (encoder, torch.randn(8, 64, WIDTH), square),
    "convolutions": (
        lambda: nn.Sequential(*(Residual() for _ in range(4))), torch.randn(8, 16, 32, 32), square,
    ),
    "attention": (Attending, torch.randn(8, 64, WIDTH), square),
}  # fmt: skip


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def plans_for(model: nn.Module, batch: Any, loss: Any) -> list[MemoryPlan]:
    fakes = Fakes(line_of_code)
    with fakes.active():
        step = FakeStep.of(fakes, model, sgd(model), batch, StepOptions(loss))
        return plans_of(step, known_rates())


def budget_for(plan: MemoryPlan) -> int:
    return int(plan.peak * 1.03)


def step(model: nn.Module, batch: Any, loss: Any) -> list[Tensor]:
    """Loss, gradients and buffers of a step with equal random numbers."""
    torch.manual_seed(1)
    model.zero_grad()
    value = loss(model, batch) if loss else model(batch)
    value.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [value.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]


@pytest.mark.parametrize("name", CASES)
def test_gradients_losses_and_buffers_stay_equal(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, batch, loss = CASES[name]
    for module in ("frontier", "selective"):
        monkeypatch.setattr(f"stepscope.planning.{module}.LEAST_BYTES", 1024)
    torch.manual_seed(0)
    model = build().train()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    expected = [step(model, batch, loss) for _ in range(2)]
    plans = plans_for(model, batch, loss)
    for plan in (plans[len(plans) // 2], plans[-1]):
        assert any(cost.plan.recompute for cost in plan.blocks.values())
        model.load_state_dict(start)
        applied = apply_plan(model, sgd(model), application_of(plan))
        for those in expected:
            for got, wanted in zip(step(model, batch, loss), those, strict=True):
                assert torch.equal(got, wanted)
        applied.remove()
        assert all("forward" not in vars(part) for part in model.modules())


def test_every_option_of_a_block_gives_equal_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("frontier", "selective"):
        monkeypatch.setattr(f"stepscope.planning.{module}.LEAST_BYTES", 1024)
    build, batch, loss = CASES["tied"]
    torch.manual_seed(0)
    model = build()
    assert isinstance(model, Tied)
    kept = frozenset({("native_layer_norm", 0), ("addmm", 0), ("addmm", 1)})
    plans = [
        BlockPlan(True), BlockPlan(True, kept), BlockPlan(True, kept, True, (0,)),
        BlockPlan(True, frozenset(), True, (0,)),
    ]  # fmt: skip

    def twice(model: nn.Module, batch: Any) -> Tensor:
        """Two forward passes before the backward pass, under autocast."""
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = model(batch) + 2 * model(batch.flip(0))
        return out

    def backward_again(model: nn.Module, batch: Any) -> Tensor:
        out: Tensor = model(batch)
        out.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return out

    losses = (loss, twice, backward_again)
    expected = [step(model, batch, one) for one in losses]
    copies = HostCopies()
    for block, plan in zip(model.blocks.children(), plans, strict=True):
        apply_to(block, plan, copies, None)
    for one, those in zip(losses, expected, strict=True):
        for got, wanted in zip(step(model, batch, one), those, strict=True):
            assert torch.equal(got, wanted)


def test_predictions_equal_counted_bytes_and_no_larger_budget_is_slower() -> None:
    model, batch = Tied(rate=0.0), torch.zeros(16, ROWS, dtype=torch.long)
    plans = plans_for(model, batch, None)
    assert len(plans) > 3
    for faster, smaller in pairwise(plans):
        assert faster.seconds <= smaller.seconds
        assert faster.peak > smaller.peak
    seconds = []
    for wanted in (plans[0], plans[-1]):
        fitted = stepscope.fit(model, sgd(model), batch, budget=budget_for(wanted))
        seconds.append(fitted.seconds)
        assert fitted.peak * 1.02 <= fitted.budget
        # The sum over stand-ins, the run of the full step, and counted bytes.
        assert abs(fitted.plan.peak - fitted.peak) < 0.01 * fitted.peak
        assert fitted.prediction is not None
        tensors = fitted.peak - WORKSPACE - fitted.prediction.peak.lines[ROUNDING]
        assert abs(tensors - counted(model, batch)) < 0.01 * tensors
        fitted.undo()
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


def counted(model: nn.Module, batch: Any) -> int:
    """Bytes of the tensors at the peak of a real step on the CPU."""
    optimizer, ledger = sgd(model), StorageLedger(torch.device("cpu"), None)
    ledger.count((batch,), "inputs")
    with ledger.watching(model, optimizer):
        ledger.begin("step")
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        ledger.end()
    (peak,) = ledger.peaks
    return peak.allocated


def test_the_smallest_budget_is_named_in_one_line() -> None:
    model, batch = Tied(), torch.zeros(16, ROWS, dtype=torch.long)
    with pytest.raises(UsageError, match=r"budget of [\d.]+ MiB is below [\d.]+ MiB") as error:
        stepscope.fit(model, sgd(model), batch, budget="10MB")
    assert "\n" not in str(error.value)
    assert all("forward" not in vars(part) for part in model.modules())


def test_the_plan_is_a_table() -> None:
    model, batch = Tied(), torch.zeros(16, ROWS, dtype=torch.long)
    plan = plans_for(model, batch, None)[-1]
    fitted = stepscope.fit(model, sgd(model), batch, budget=budget_for(plan))
    again = stepscope.fit(model, sgd(model), batch, budget=budget_for(plan))
    assert str(again) == str(fitted)
    assert {len(layer_owners(block)) for block in model.blocks} <= {0, 1}
    words = str(fitted)
    assert words.startswith("predicted peak: ")
    assert "recompute" in words
    html = fitted._repr_html_()
    assert html.startswith("<svg")
    assert "recompute" in html
    assert "within the budget" in html
    again.undo()
    fitted.undo()
    assert all("forward" not in vars(part) for part in model.modules())


def test_random_numbers_in_a_graph_must_have_been_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their state cannot be read while a CUDA graph is captured."""
    tokens = torch.zeros(16, ROWS, dtype=torch.long)
    monkeypatch.setattr("stepscope.planning.selective.is_capturing", lambda: True)
    for rate in (0.0, 0.1):
        (plan, *_) = plans_for(Tied(rate), tokens, None)[-1].blocks.values()
        assert plan.plan.is_random == bool(rate)
        block = Mlp(0, rate=0.1)
        apply_to(block, BlockPlan(True, is_random=bool(rate)), HostCopies(), None)
        if rate:
            block(torch.zeros(2, WIDTH))
        else:
            with pytest.raises(StepscopeError, match="draws random numbers"):
                block(torch.zeros(2, WIDTH))


def test_blocks_are_found_by_structure() -> None:
    class Stack(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Mlp(index) for index in range(count))

    two = nn.ModuleDict({"encoder": Stack(3), "decoder": Stack(3)})
    names = list(repeated_blocks(two))
    assert names[0] == "encoder.blocks.0"
    assert len(names) == 6
    assert not repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    blocks = {str(index): Mlp(index) for index in range(4)}
    assert len(set(structures(blocks).values())) == 1
    blocks["3"].dropout.p = 0.5
    assert len(set(structures(blocks).values())) == 2


def test_sizes_of_budgets() -> None:
    assert bytes_of("60GiB") == 60 * 2**30
    assert bytes_of("1.5 GB") == 1_500_000_000
    assert bytes_of(12) == 12
    for wrong in ("", "60 GiBs", "0", "-1GB", "1.2.3GB", "many"):
        with pytest.raises(UsageError):
            bytes_of(wrong)
