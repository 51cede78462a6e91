"""The fused update of a torch optimizer during the backward pass of a `TrainStep`."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import stepscope
from stepscope.acceleration.optimizer import FusedUpdate, fuse_optimizer
from stepscope.acceleration.train_step import TrainStep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, STEPS = 24, 9


class Tied(nn.Module):
    """Its embedding is also its head, and its hidden layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WIDTH, 8)
        self.hidden = nn.Linear(8, 8)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.to(DEVICE)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.frozen
        for _ in range(2):
            x = x + torch.tanh(self.hidden(x))
        logits = x @ self.embed.weight.T
        penalty = 1e-2 * self.hidden.weight.square().sum()
        return nn.functional.cross_entropy(logits, tokens.roll(1)) + penalty


def tokens(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(WIDTH, (16,), generator=generator).to(DEVICE)


def created(scheduled: bool = True, **options: Any) -> tuple[TrainStep, FusedUpdate, Any]:
    model = Tied()
    decayed, plain = [model.embed.weight], [model.hidden.weight, model.hidden.bias, model.frozen]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": 2e-2}]
    optimizer = AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if scheduled else None
    fused = fuse_optimizer(optimizer)
    assert isinstance(fused, FusedUpdate)
    return stepscope.TrainStep(model, optimizer, scheduler=scheduler, **options), fused, scheduler


def test_it_trains_as_an_update_after_the_backward_pass() -> None:
    step, fused, _ = created()
    other, _, _ = created(update_in_backward=False)
    assert "updated in the backward pass" in step.explain()
    assert "updated in the backward pass" not in other.explain()
    with warnings.catch_warnings():
        # A scheduler warns if it misses `optimizer.step()`.
        warnings.simplefilter("error", UserWarning)
        losses = [step(tokens(number)) for number in range(STEPS)]
    expected = [other(tokens(number)) for number in range(STEPS)]
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-7)
    assert losses[-1] < losses[0]
    assert all(parameter.grad is None for parameter in step.model.parameters())
    saved, state = step.optimizer.state_dict(), other.optimizer.state_dict()
    assert saved["param_groups"] == state["param_groups"]
    assert saved["state"].keys() == state["state"].keys() == {0, 1, 2}
    for number, values in state["state"].items():
        assert values["step"] == STEPS
        for name, value in values.items():
            actual = saved["state"][number][name]
            assert actual.device == value.device, name
            torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-7)
    fused.undo()
    assert all(state["step"].is_cpu for state in step.optimizer.state.values())


def test_a_loaded_state_is_used() -> None:
    step, _, _ = created(scheduled=False)
    for number in range(3):
        step(tokens(number))
    weights, state = copy.deepcopy((step.model.state_dict(), step.optimizer.state_dict()))
    expected = [step(tokens(number)) for number in range(3, STEPS)]
    step.model.load_state_dict(weights)
    step.optimizer.load_state_dict(state)
    again = [step(tokens(number)) for number in range(3, STEPS)]
    torch.testing.assert_close(again, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"accumulate": 2}], ids=str)
def test_what_needs_all_gradients_updates_after_the_backward_pass(options: Any) -> None:
    step, _, _ = created(**options)
    assert f"follows the backward pass: {next(iter(options))} needs all" in step.explain()
    before = step.model.embed.weight.detach().clone()  # type: ignore[union-attr]
    for number in range(2):
        step(tokens(number))
    assert not torch.equal(step.model.embed.weight, before)  # type: ignore[union-attr]


def test_what_the_optimizer_gets_later_moves_the_update_after_the_backward_pass() -> None:
    calls = []
    for change, reason in (
        (lambda one: one.register_step_post_hook(lambda *_: calls.append(1)), "step hooks"),
        (lambda one: one.add_param_group(group(amsgrad=True)), "amsgrad=True"),
    ):
        step, _, _ = created(scheduled=False)
        step(tokens(0))
        assert "updated in the backward pass" in step.explain()
        change(step.optimizer)
        step(tokens(1))
        assert f"follows the backward pass: {reason}" in step.explain().replace(
            "the optimizer has ", ""
        )
    assert calls == [1]


def group(**options: Any) -> dict[str, Any]:
    return {"params": [nn.Parameter(torch.ones(4, device=DEVICE))], **options}


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=str)
def test_an_undone_update_is_that_of_torch(options: Any) -> None:
    step, fused, _ = created(scheduled=False, **options)
    step(tokens(0))
    fused.undo()
    step(tokens(1))
    assert "follows the backward pass" in step.explain()
    assert all(state["step"] == 2 for state in step.optimizer.state.values())


def test_an_optimizer_with_hooks_updates_after_the_backward_pass() -> None:
    model = Tied()
    optimizer = AdamW(model.parameters())
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    assert isinstance(fuse_optimizer(optimizer), FusedUpdate)
    step = stepscope.TrainStep(model, optimizer, graph="off")
    step(tokens(0))
    assert calls == [1]
    assert "follows the backward pass: the optimizer has step hooks" in step.explain()


def test_the_reason_for_an_update_after_the_backward_pass() -> None:
    scaler = torch.amp.GradScaler(DEVICE)

    def reason(optimizer: torch.optim.Optimizer, fuse: bool = False, **options: Any) -> str:
        assert not fuse or isinstance(fuse_optimizer(optimizer), FusedUpdate)
        step = stepscope.TrainStep(model, optimizer, graph="off", **options)
        return step.explain().partition("follows the backward pass: ")[2]

    model = Tied()
    parameters = [*model.parameters()]
    both = {"max_grad_norm": 1.0, "scaler": scaler}
    assert reason(AdamW(parameters), **both) == "max_grad_norm and scaler need all gradients"
    assert reason(AdamW(parameters), scaler=scaler) == "scaler needs all gradients"
    assert reason(AdamW(parameters), update_in_backward=False) == "update_in_backward=False"
    assert reason(AdamW(parameters)) == "the optimizer was not passed to stepscope.accelerate"
    assert reason(torch.optim.SGD(parameters)) == "SGD is not torch.optim.AdamW or Adam"
    assert reason(AdamW(parameters, amsgrad=True)) == "amsgrad=True"
    groups = [{"params": parameters[:1], "maximize": True}, {"params": parameters[1:]}]
    assert reason(AdamW(groups), fuse=True) == "maximize=True"
    assert reason(AdamW(parameters), fuse=True, update_in_backward=True) == ""
    assert "one launch for all" in reason(AdamW(parameters), fuse=True)
    large = [nn.Parameter(torch.zeros(2, 4_000_000, device=DEVICE))]
    assert reason(AdamW(large), fuse=True) == ""


@pytest.mark.parametrize("late", [False, True])
def test_the_update_may_move_out_of_the_backward_pass_between_steps(late: bool) -> None:
    step, _, _ = created(scheduled=False)
    other, _, _ = created(scheduled=False, update_in_backward=False)
    for number in range(STEPS):
        # As a capture that is refused, or one that follows eager steps.
        step._is_eager = lambda number=number: (number >= 2) is late  # type: ignore[method-assign]
        torch.testing.assert_close(
            step(tokens(number)), other(tokens(number)), rtol=1e-6, atol=1e-7
        )
    assert all(state["step"] == STEPS for state in step.optimizer.state.values())
