"""Casts of weights follow every write of a weight, also one through `.data`, which no version
counter shows: an accelerated model trains as the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepscope
from accelerated_models import COMPILED, Model, batch, created
from fake_graphs import FakeGraphs
from stepscope.acceleration.capture import Captured
from stepscope.acceleration.graphs.casts import Casts, WrittenCasts
from stepscope.kernels.weight_copies import WeightCopies, WrittenCast
from stepscope.model import ModelConfig, TransformerLM

RATE = 0.5
Loop = Callable[[nn.Module], list[float]]


def loss_of(model: nn.Module, step: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(*batch(step))
    return loss


def write(model: nn.Module, gradients: Any = None) -> None:
    """Update all weights through `.data`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter, gradient in zip(
        parameters, gradients or [p.grad for p in parameters], strict=True
    ):
        if gradient is not None:
            parameter.data.sub_(RATE * gradient)
        parameter.grad = None


def with_autograd_grad(model: nn.Module) -> list[float]:
    losses = []
    for step in range(4):
        loss = loss_of(model, step)
        write(model, torch.autograd.grad(loss, [*model.parameters()]))
        losses.append(float(loss.detach()))
    return losses


def unfrozen(model: nn.Module) -> list[float]:
    """Weights that are frozen when the model is accelerated, or its first steps run."""
    parameters = [p for name, p in model.named_parameters() if "blocks.0" in name]
    losses = []
    for step in range(6):
        for parameter in parameters:
            parameter.requires_grad_(step >= 2)
        loss = loss_of(model, step)
        loss.backward()
        write(model)
        losses.append(float(loss.detach()))
    return losses


def evaluated_before_the_update(model: nn.Module) -> list[float]:
    losses = []
    for step in range(4):
        loss = loss_of(model, step)
        loss.backward()
        # With gradients enabled, as for a metric that is logged.
        losses += [float(loss.detach()), float(loss_of(model, 100).detach())]
        write(model)
    return losses


def clamped_after_the_update(model: nn.Module) -> list[float]:
    """A Wasserstein critic."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for step in range(4):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.05, 0.05)
        losses.append(float(loss.detach()))
    return losses


def exchanged_for_an_evaluation(model: nn.Module) -> list[float]:
    """Averaged weights, written and restored through `.data`."""
    losses = []
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        write(model)
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        losses += [float(loss.detach()), float(loss_of(model, 100).detach())]
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(value)
    return losses


def two_losses_before_a_backward(model: nn.Module) -> list[float]:
    """The casts of the first forward are those of its backward."""
    first = loss_of(model, 0)
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    second = loss_of(model, 1)
    gradients = torch.autograd.grad(first + second, [*model.parameters()])
    return [float(g.norm()) for g in gradients if g.dim() > 1]


LOOPS: list[Loop] = [
    with_autograd_grad,
    unfrozen,
    evaluated_before_the_update,
    clamped_after_the_update,
    exchanged_for_an_evaluation,
    two_losses_before_a_backward,
]


def own() -> TransformerLM:
    torch.manual_seed(0)
    config = ModelConfig(d_model=32, d_ff=48, n_layers=1, n_heads=2, vocab=50, context=12)
    return TransformerLM(config)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("create", [created, own])
def test_writes_through_data_are_used(create: Callable[[], nn.Module], loop: Loop) -> None:
    plain, fused = create(), create()
    report = stepscope.accelerate(fused, compile=COMPILED if create is created else False)
    expected = loop(plain)
    assert loop(fused) == pytest.approx(expected, rel=1e-2)
    report.undo()


def test_a_copy_of_an_accelerated_model_uses_writes_through_data() -> None:
    model = own()
    stepscope.accelerate(model)
    clone = copy.deepcopy(model)
    assert with_autograd_grad(clone) == pytest.approx(with_autograd_grad(own()), rel=1e-2)


def test_undo_restores_the_layers_and_casts_of_a_model_of_this_library() -> None:
    for fused in (False, True):
        model = own()
        model.set_fused(fused)
        stepscope.accelerate(model).undo()
        assert model.fused_projections == fused
        assert {one.fused for one in model.modules() if hasattr(one, "fused")} == {fused}
        assert model.copies.keeps
        assert model.copies.reads


class Writing(torch.optim.SGD):
    """Writes the casts together with the weights, as the fused kernels do."""

    def __init__(self, model: nn.Module, copies: WeightCopies) -> None:
        super().__init__(model.parameters(), lr=RATE)
        self._copies = copies
        self.written = 0

    @torch.no_grad()
    def step(self, _: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                copy = self._copies.find(parameter)
                if copy is not None:
                    copy.copy_(parameter)
                    self._copies.written(parameter)
                    self.written += 1


class Graphs(FakeGraphs):
    """A capture does not change casts either."""

    def __init__(self, model: nn.Module, optimizer: Writing) -> None:
        super().__init__(model, optimizer)
        self._casts = optimizer._copies

    def tensors(self) -> list[Tensor]:
        groups = self._casts._groups.values()
        return [*super().tensors(), *(group.concatenated for group in groups)]


STEPS = 9


def captured(
    between: Callable[[Model, int], None],
    *,
    graph: bool = True,
    within: Callable[[Model], None] = lambda _: None,
) -> tuple[list[float], Captured | None, Writing]:
    """Train in captured steps, with `between(model, step)` before each and `within(model)` at their
    ends."""
    model = created()
    report = stepscope.accelerate(model, torch.optim.AdamW(model.parameters()), compile=COMPILED)
    assert report.compilation is not None
    copies = report.compilation.copies
    assert copies is not None
    optimizer = Writing(model, copies)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        within(model)
        optimizer.zero_grad()
        return loss

    backend = Graphs(model, optimizer)
    function = Captured(step, backend=backend, modules=[model], optimizer=optimizer)
    losses = []
    for number in range(STEPS):
        between(model, number)
        losses.append(float((function if graph else step)(*batch(number)).detach()))
    return losses, function if graph else None, optimizer


def nothing(*_: Any) -> None:
    pass


def test_a_captured_step_reads_the_casts_that_its_update_writes() -> None:
    losses, function, optimizer = captured(nothing)
    expected, _, eager = captured(nothing, graph=False)
    assert losses == pytest.approx(expected, rel=1e-2)
    assert function is not None
    assert function.statistics.captured == 1
    assert function.statistics.replayed == STEPS - 3
    # Two MLPs, also in the capture. Head and loss are one operator, which casts its weight.
    assert optimizer.written == (STEPS + 1) * 6
    assert eager.written == 0, "nothing reads them outside of captured steps"


def halved(weight: Tensor) -> None:
    weight.data.mul_(0.5)


def row_halved(weight: Tensor) -> None:
    weight.data[3].mul_(0.5)


@pytest.mark.parametrize(
    ("name", "write_one"),
    [("blocks.0.mlp.down_proj.weight", halved), ("blocks.1.mlp.gate_proj.weight", row_halved)],
)
def test_a_captured_step_notices_a_write_through_data(
    name: str, write_one: Callable[[Tensor], None]
) -> None:
    def between(model: Model, step: int) -> None:
        if step in (5, 7):
            write_one(model.get_parameter(name))

    losses, function, _ = captured(between)
    assert losses == pytest.approx(captured(between, graph=False)[0], rel=1e-2)
    assert function is not None
    assert function.statistics.captured == 2, "then each replay casts"
    assert function.statistics.replayed == STEPS - 4


def test_a_captured_step_notices_a_write_through_data_within_it() -> None:
    def decay(model: Model) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(0.9)

    losses, function, _ = captured(nothing, within=decay)
    assert losses == pytest.approx(captured(nothing, within=decay, graph=False)[0], rel=1e-2)
    assert function is not None
    assert function.statistics.captured == 2


@pytest.mark.parametrize("shape", [(4, 64), (3, 4, 5), (300, 260), (7,)])
@pytest.mark.parametrize("transposed", [False, True])
def test_casts_are_repeated_if_an_entry_of_any_row_was_written(
    shape: tuple[int, ...], transposed: bool
) -> None:
    data = torch.randn(*shape)
    if transposed and len(shape) == 2:
        data = data.T.contiguous().T
    weight, copies = nn.Parameter(data), WeightCopies(keep=False)
    optimizer = torch.optim.SGD([weight])
    optimizer._copies = copies  # type: ignore[attr-defined]
    casts = Casts([optimizer])
    with casts.kept(read=True):
        copies.narrow((weight,), torch.bfloat16)
    written = casts.written()
    (group,) = copies._groups.values()
    written.refresh()
    assert not written.were_stale
    for row in range(0, shape[0], 1 + shape[0] // 16):
        weight.data[row] += 1
        written.refresh()
        assert torch.equal(group.concatenated, weight.bfloat16()), row
    # Those in another order in memory are repeated in any case.
    assert written.were_stale != (transposed and len(shape) == 2)


def test_largest_magnitudes_of_fp8_casts_are_bounds() -> None:
    weight = nn.Parameter(torch.randn(64, 32))
    amax = weight.detach().abs().max().expand(2).clone()
    before = amax.clone()
    written = WrittenCasts([WrittenCast(weight, amax, is_amax=True)])
    for factor, stale in ((1.0, False), (0.5, False), (4.0, True)):
        weight.data.mul_(factor)
        written.refresh()
        assert written.were_stale == stale
    assert torch.equal(amax, 2 * before)
