"""FusedAdamW against the naive AdamW, and stochastic rounding of bfloat16 moments."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accuracy import hold_to_policy
from stepscope.optim import AdamW, FusedAdamW, triton_adamw
from stepscope.optim.triton_adamw import BLOCK

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((3,), (BLOCK,), (33, 125), (1, 1), (2 * BLOCK + 5,))


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(shape, generator=generator) for shape in SHAPES)
    return [nn.Parameter(tensor.to(DEVICE, dtype)) for tensor in tensors]


def train(
    params: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    steps: int,
    start: int = 0,
    skip: int | None = None,
) -> None:
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        for number, parameter in enumerate(params):
            gradient = torch.randn(parameter.shape, generator=generator) * 10.0 ** (number - 3)
            parameter.grad = (
                None if number == skip and step == 1 else gradient.to(DEVICE, parameter.dtype)
            )
        optimizer.step()


def groups(params: list[nn.Parameter]) -> list[dict[str, object]]:
    return [
        {"params": params[:2], "weight_decay": 0.3, "betas": (0.4, 0.95)},
        {"params": params[2:], "weight_decay": 0.0, "lr": 3e-3, "eps": 1e-6},
    ]


def trained(
    rule: Callable[..., AdamW],
    dtype: torch.dtype = torch.float32,
    grouping: Callable[[list[nn.Parameter]], list[Any]] = groups,
    steps: int = 8,
) -> dict[str, Tensor]:
    """Parameters and state after some steps; one tensor has no gradient in the second."""
    params = parameters(dtype)
    optimizer = rule(grouping(params))
    train(params, optimizer, steps, skip=3)
    return {
        f"{name} of {number}": tensor.cpu()
        for number, parameter in enumerate(params)
        for name, tensor in {"parameter": parameter.detach(), **optimizer.state[parameter]}.items()
    }


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tensors of each launch."""
    counts: list[int] = []
    update = triton_adamw.Table.update

    def counting(table: triton_adamw.Table, *arguments: object, **named: object) -> None:
        counts.append(len(table.rows))
        update(table, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_adamw.Table, "update", counting)
    return counts


@pytest.mark.parametrize("grouping", [list, groups], ids=["one group", "two groups"])
def test_twenty_steps_match_naive_adamw(
    grouping: Callable[[list[nn.Parameter]], list[object]], launches: list[int]
) -> None:
    """One tensor has no gradient in the second step, so its step count differs from then on."""
    run = functools.partial(trained, grouping=grouping, steps=20)
    ours = run(FusedAdamW)
    assert launches == [5, 4, *[5] * 18], "one launch a step takes all tensors"
    hold_to_policy(run(AdamW, torch.float64), run(AdamW), ours)
    assert [ours[f"step of {number}"].item() for number in (2, 3)] == [20, 19]


def test_float16_gradients_and_parameters(launches: list[int]) -> None:
    """The kernel rounds once, where the naive version rounds at every operation."""
    half = nn.Parameter(torch.linspace(-2, 2, 100).to(DEVICE, torch.float16))
    optimizer = FusedAdamW([half], lr=0.1, weight_decay=0.0, eps=1e-4)
    half.grad = torch.full_like(half, 0.5)
    before = half.detach().float()
    optimizer.step()
    expected = (before - 0.1 * 0.5 / (0.5 + 1e-4)).half()
    torch.testing.assert_close(half.detach(), expected, rtol=1e-3, atol=1e-3)
    assert launches == [1]


@pytest.mark.parametrize(
    ("first", "second"), [(FusedAdamW, AdamW), (torch.optim.AdamW, FusedAdamW)]
)
def test_state_loads_between_implementations(
    first: type[torch.optim.Optimizer], second: type[torch.optim.Optimizer]
) -> None:
    params = parameters()
    optimizer = first(groups(params))
    train(params, optimizer, 3)
    moved = copy.deepcopy(params)
    successor = second(groups(moved), lr=0.7)
    successor.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(params, optimizer, 3, start=3)
    train(moved, successor, 3, start=3)
    torch.testing.assert_close(moved, params, rtol=1e-6, atol=1e-7)


def test_new_addresses_and_hyperparameters_take_effect() -> None:
    ours, theirs = parameters(), parameters()
    fused, plain = FusedAdamW(ours), AdamW(theirs)
    for step in range(3):
        for params, optimizer in ((ours, fused), (theirs, plain)):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            for parameter in params:
                parameter.data = parameter.data.clone()
            train(params, optimizer, 1, start=step)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_unsupported_parameters_are_updated_by_the_naive_version(launches: list[int]) -> None:
    def mixed() -> list[nn.Parameter]:
        drawn = [*parameters()[:2], nn.Parameter(torch.ones(4, dtype=torch.float64, device=DEVICE))]
        return [*drawn, nn.Parameter(torch.ones(6, 4, device=DEVICE).T)]

    ours, theirs = mixed(), mixed()
    train(ours, FusedAdamW(ours), 2)
    train(theirs, AdamW(theirs), 2)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert launches == [2, 2]


@pytest.mark.parametrize("layout", ["negated", "transposed"])
def test_the_memory_of_a_gradient_may_differ_from_that_of_its_parameter(layout: str) -> None:
    results = []
    for rule in (AdamW, FusedAdamW):
        values = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
        parameter = nn.Parameter(values.to(DEVICE))
        gradient = torch.arange(15.0, device=DEVICE).view(3, 5).t() - 7
        # A lazily negated tensor is contiguous, and its memory has the other sign.
        negated = torch._neg_view((-gradient).contiguous())
        parameter.grad = negated if layout == "negated" else gradient
        rule([parameter], lr=0.1).step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results)


def test_closure_runs_with_gradients_enabled_and_returns_its_loss() -> None:
    weight = nn.Parameter(torch.tensor([3.0], device=DEVICE))
    optimizer = FusedAdamW([weight], lr=0.1, weight_decay=0.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 9.0
    assert weight.item() == pytest.approx(2.9)


def test_an_unaligned_address() -> None:
    buffer = torch.ones(BLOCK + 1, device=DEVICE)
    odd, even = nn.Parameter(buffer[1:]), nn.Parameter(torch.ones(BLOCK, device=DEVICE))
    assert odd.data_ptr() % 16
    for parameter in (odd, even):
        parameter.grad = torch.linspace(-1, 1, BLOCK, device=DEVICE)
        FusedAdamW([parameter]).step()
    assert torch.equal(odd, even)


def second_moment_after(steps: int, **how: object) -> Tensor:
    """Return the second moment of a gradient that is 20 in the first step and 1 in all others."""
    weight = nn.Parameter(torch.zeros(3 * BLOCK, device=DEVICE))
    optimizer = FusedAdamW([weight], betas=(0.9, 0.999), **how)  # type: ignore[arg-type]
    for step in range(steps):
        weight.grad = torch.full_like(weight, 20.0 if step == 0 else 1.0)
        optimizer.step()
    return optimizer.state[weight]["exp_avg_sq"]


def test_bfloat16_moments_are_correct_on_average() -> None:
    """Each step changes the second moment by 1/700, which rounding to nearest would lose."""
    exact = second_moment_after(8)[0].item()
    start = second_moment_after(1)[0].item()
    moved = second_moment_after(8, stochastic_bfloat16_state=True)
    assert moved.dtype == torch.bfloat16
    assert moved.unique().numel() > 1
    change = moved.float().mean().item() - start
    assert change == pytest.approx(exact - start, rel=0.1)


def test_stochastic_rounding_is_reproducible_and_continues_after_a_load() -> None:
    def run(seed: int, reload: bool = False) -> list[nn.Parameter]:
        params = parameters()
        optimizer = FusedAdamW(params, stochastic_bfloat16_state=True, seed=seed)
        train(params, optimizer, 2)
        if reload:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = FusedAdamW(params, stochastic_bfloat16_state=True, seed=seed)
            optimizer.load_state_dict(saved)
        train(params, optimizer, 2, start=2)
        return params

    first = run(0)
    assert all(map(torch.equal, first, run(0)))
    assert all(map(torch.equal, first, run(0, reload=True)))
    assert not torch.equal(first[-1], run(1)[-1])


class TestCapturable:
    def test_matches_naive_adamw_with_a_step_count_per_tensor(self, launches: list[int]) -> None:
        ours = trained(lambda params: FusedAdamW(params, capturable=True))
        assert launches == [5, 4, *[5] * 6]
        hold_to_policy(trained(AdamW, torch.float64), trained(AdamW), ours)
        assert [ours[f"step of {number}"].item() for number in (2, 3)] == [8, 7]

    def test_buffers_of_a_replay_keep_their_addresses(self) -> None:
        """A replay runs the same launches on the same buffers; here they are launched manually."""
        params, others = parameters(), parameters()
        optimizer, plain = FusedAdamW(params, capturable=True), AdamW(others)
        train(params, optimizer, 1)
        train(others, plain, 1)
        ((launch),) = optimizer._launches.launches.values()
        buffers = (launch.settings.rows.data_ptr(), launch.table)
        for rate in (1e-3, 4e-3):
            optimizer.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = rate
            optimizer.refresh()
            plain.step()
            launch.settings.advance()
            ((_, dtypes),) = optimizer._launches.launches
            launch.table.update(launch.settings.rows, dtypes, stochastic=False, seed=0)
        assert (launch.settings.rows.data_ptr(), launch.table) == buffers
        torch.testing.assert_close(params, others, rtol=1e-6, atol=1e-7)

    def test_prepare_changes_nothing(self) -> None:
        params = parameters()
        before = [parameter.detach().clone() for parameter in params]
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        optimizer = FusedAdamW(params, capturable=True)
        optimizer.prepare()
        optimizer.prepare()
        torch.testing.assert_close(
            [parameter.detach() for parameter in params], before, rtol=0, atol=0
        )
        assert {state["step"].item() for state in optimizer.state.values()} == {0.0}
        optimizer.step()
        assert {state["step"].item() for state in optimizer.state.values()} == {1.0}

    def test_state_loads_from_and_into_naive_adamw(self) -> None:
        params = parameters()
        optimizer = AdamW(params)
        train(params, optimizer, 3)
        moved = copy.deepcopy(params)
        successor = FusedAdamW(moved, capturable=True)
        successor.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        back = copy.deepcopy(params)
        last = AdamW(back)
        train(moved, successor, 2, start=3)
        last.load_state_dict(copy.deepcopy(successor.state_dict()))
        back = copy.deepcopy(moved)
        last.param_groups[0]["params"] = back
        last.state = {b: last.state[a] for a, b in zip(list(last.state), back, strict=True)}
        train(params, optimizer, 4, start=3)
        train(back, last, 2, start=5)
        torch.testing.assert_close(back, params, rtol=1e-6, atol=1e-7)

    def test_what_cannot_be_captured_raises(self) -> None:
        with pytest.raises(ValueError, match="same random numbers for rounding at every replay"):
            FusedAdamW(parameters(), capturable=True, stochastic_bfloat16_state=True)
        with pytest.raises(RuntimeError, match="needs FusedAdamW"):
            FusedAdamW(parameters()).prepare()
        wide = parameters(torch.float64)
        wide[0].grad = torch.ones_like(wide[0])
        with pytest.raises(RuntimeError, match=r"not torch\.float64"):
            FusedAdamW(wide, capturable=True).step()
