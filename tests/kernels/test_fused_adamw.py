"""AdamW in one pass against the rule written out, and bfloat16 moments against chance."""

from __future__ import annotations

import copy
from collections.abc import Callable

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
    drawn = (torch.randn(shape, generator=generator) for shape in SHAPES)
    return [nn.Parameter(each.to(DEVICE, dtype)) for each in drawn]


def train(
    held: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int, start: int = 0,
    skip: int | None = None,
) -> None:  # fmt: skip
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        for number, each in enumerate(held):
            drawn = torch.randn(each.shape, generator=generator) * 10.0 ** (number - 3)
            each.grad = None if number == skip and step == 1 else drawn.to(DEVICE, each.dtype)
        optimizer.step()


def groups(held: list[nn.Parameter]) -> list[dict[str, object]]:
    return [
        {"params": held[:2], "weight_decay": 0.3, "betas": (0.4, 0.95)},
        {"params": held[2:], "weight_decay": 0.0, "lr": 3e-3, "eps": 1e-6},
    ]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each launch took."""
    taken: list[int] = []
    update = triton_adamw.Table.update

    def counting(table: triton_adamw.Table, *arguments: object, **named: object) -> None:
        taken.append(len(table.rows))
        update(table, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_adamw.Table, "update", counting)
    return taken


@pytest.mark.parametrize("params", [list, groups], ids=["one group", "two groups"])
def test_twenty_steps_as_the_rule_written_out(
    params: Callable[[list[nn.Parameter]], list[object]], launches: list[int]
) -> None:
    """One tensor has no gradient in the second step, so its count differs from then on."""

    def trained(rule: type[AdamW], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        held = parameters(dtype)
        optimizer = rule(params(held))
        train(held, optimizer, 20, skip=3)
        return {
            f"{name} of {number}": tensor
            for number, each in enumerate(held)
            for name, tensor in {"parameter": each.detach(), **optimizer.state[each]}.items()
        }

    ours = trained(FusedAdamW)
    assert launches == [5, 4, *[5] * 18], "one launch a step takes all tensors"
    hold_to_policy(trained(AdamW, torch.float64), trained(AdamW), ours)
    assert [ours[f"step of {number}"].item() for number in (2, 3)] == [20, 19]


def test_float16_gradients_and_parameters(launches: list[int]) -> None:
    """Rounded once where the rule written out rounds at every operation."""
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
def test_state_moves(
    first: type[torch.optim.Optimizer], second: type[torch.optim.Optimizer]
) -> None:
    held = parameters()
    optimizer = first(groups(held))
    train(held, optimizer, 3)
    moved = copy.deepcopy(held)
    successor = second(groups(moved), lr=0.7)
    successor.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(held, optimizer, 3, start=3)
    train(moved, successor, 3, start=3)
    torch.testing.assert_close(moved, held, rtol=1e-6, atol=1e-7)


def test_new_addresses_and_new_settings_are_seen() -> None:
    ours, theirs = parameters(), parameters()
    fused, plain = FusedAdamW(ours), AdamW(theirs)
    for step in range(3):
        for held, optimizer in ((ours, fused), (theirs, plain)):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            for each in held:
                each.data = each.data.clone()
            train(held, optimizer, 1, start=step)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_what_the_kernel_cannot_take_is_updated_all_the_same(launches: list[int]) -> None:
    def mixed() -> list[nn.Parameter]:
        drawn = [*parameters()[:2], nn.Parameter(torch.ones(4, dtype=torch.float64, device=DEVICE))]
        return [*drawn, nn.Parameter(torch.ones(6, 4, device=DEVICE).T)]

    ours, theirs = mixed(), mixed()
    train(ours, FusedAdamW(ours), 2)
    train(theirs, AdamW(theirs), 2)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert launches == [2, 2]


def test_closure_runs_with_gradients_and_its_loss_returns() -> None:
    weight = nn.Parameter(torch.tensor([3.0], device=DEVICE))
    optimizer = FusedAdamW([weight], lr=0.1, weight_decay=0.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 9.0
    assert weight.item() == pytest.approx(2.9)


def test_an_address_that_is_no_multiple_of_sixteen() -> None:
    room = torch.ones(BLOCK + 1, device=DEVICE)
    odd, even = nn.Parameter(room[1:]), nn.Parameter(torch.ones(BLOCK, device=DEVICE))
    assert odd.data_ptr() % 16
    for each in (odd, even):
        each.grad = torch.linspace(-1, 1, BLOCK, device=DEVICE)
        FusedAdamW([each]).step()
    assert torch.equal(odd, even)


def second_moment_after(steps: int, **how: object) -> Tensor:
    """Of a gradient that is 1 in every step but the first, where it is 20."""
    weight = nn.Parameter(torch.zeros(3 * BLOCK, device=DEVICE))
    optimizer = FusedAdamW([weight], betas=(0.9, 0.999), **how)  # type: ignore[arg-type]
    for step in range(steps):
        weight.grad = torch.full_like(weight, 20.0 if step == 0 else 1.0)
        optimizer.step()
    return optimizer.state[weight]["exp_avg_sq"]


def test_bfloat16_moments_are_right_on_average() -> None:
    """Each step adds a 700th to the second moment: by the nearest, bfloat16 would never move."""
    exact = second_moment_after(8)[0].item()
    start = second_moment_after(1)[0].item()
    moved = second_moment_after(8, stochastic_bfloat16_state=True)
    assert moved.dtype == torch.bfloat16
    assert moved.unique().numel() > 1
    change = moved.float().mean().item() - start
    assert change == pytest.approx(exact - start, rel=0.1)


def test_chance_repeats_with_its_seed_and_goes_on_after_a_load() -> None:
    def run(seed: int, reload: bool = False) -> list[nn.Parameter]:
        held = parameters()
        optimizer = FusedAdamW(held, stochastic_bfloat16_state=True, seed=seed)
        train(held, optimizer, 2)
        if reload:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = FusedAdamW(held, stochastic_bfloat16_state=True, seed=seed)
            optimizer.load_state_dict(saved)
        train(held, optimizer, 2, start=2)
        return held

    first = run(0)
    assert all(map(torch.equal, first, run(0)))
    assert all(map(torch.equal, first, run(0, reload=True)))
    assert not torch.equal(first[-1], run(1)[-1])


class TestCapturable:
    def test_as_the_rule_written_out_with_a_count_for_each_tensor(
        self, launches: list[int]
    ) -> None:
        def trained(rule: Callable[..., AdamW], dtype: torch.dtype) -> dict[str, Tensor]:
            held = parameters(dtype)
            optimizer = rule(groups(held))
            train(held, optimizer, 8, skip=3)
            return {
                f"{name} of {number}": tensor.cpu()
                for number, each in enumerate(held)
                for name, tensor in {"parameter": each.detach(), **optimizer.state[each]}.items()
            }

        ours = trained(lambda held: FusedAdamW(held, capturable=True), torch.float32)
        assert launches == [5, 4, *[5] * 6]
        plain = trained(AdamW, torch.float32)
        hold_to_policy(trained(AdamW, torch.float64), plain, ours)
        assert [ours[f"step of {number}"].item() for number in (2, 3)] == [8, 7]

    def test_what_a_replay_reads_stays_where_it_is(self) -> None:
        """A replay runs the same launches on the same buffers: here they are run by hand."""
        held, others = parameters(), parameters()
        optimizer, plain = FusedAdamW(held, capturable=True), AdamW(others)
        train(held, optimizer, 1)
        train(others, plain, 1)
        ((counted),) = optimizer._launches.values()
        buffers = (counted.settings.rows.data_ptr(), counted.table)
        for rate in (1e-3, 4e-3):
            optimizer.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = rate
            optimizer.refresh()
            plain.step()
            counted.settings.advance()
            ((_, formats),) = optimizer._launches
            counted.table.update(counted.settings.rows, formats, stochastic=False, seed=0)
        assert (counted.settings.rows.data_ptr(), counted.table) == buffers
        torch.testing.assert_close(held, others, rtol=1e-6, atol=1e-7)

    def test_prepare_changes_nothing(self) -> None:
        held = parameters()
        before = [each.detach().clone() for each in held]
        for each in held:
            each.grad = torch.ones_like(each)
        optimizer = FusedAdamW(held, capturable=True)
        optimizer.prepare()
        optimizer.prepare()
        torch.testing.assert_close([each.detach() for each in held], before, rtol=0, atol=0)
        assert {state["step"].item() for state in optimizer.state.values()} == {0.0}
        optimizer.step()
        assert {state["step"].item() for state in optimizer.state.values()} == {1.0}

    def test_state_moves_in_and_out(self) -> None:
        held = parameters()
        optimizer = AdamW(held)
        train(held, optimizer, 3)
        moved = copy.deepcopy(held)
        successor = FusedAdamW(moved, capturable=True)
        successor.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        back = copy.deepcopy(held)
        last = AdamW(back)
        train(moved, successor, 2, start=3)
        last.load_state_dict(copy.deepcopy(successor.state_dict()))
        back = copy.deepcopy(moved)
        last.param_groups[0]["params"] = back
        last.state = {b: last.state[a] for a, b in zip(list(last.state), back, strict=True)}
        train(held, optimizer, 4, start=3)
        train(back, last, 2, start=5)
        torch.testing.assert_close(back, held, rtol=1e-6, atol=1e-7)

    def test_what_cannot_be_captured_is_refused(self) -> None:
        with pytest.raises(ValueError, match="same chance at every replay"):
            FusedAdamW(parameters(), capturable=True, stochastic_bfloat16_state=True)
        with pytest.raises(RuntimeError, match="only a capturable"):
            FusedAdamW(parameters()).prepare()
        wide = parameters(torch.float64)
        wide[0].grad = torch.ones_like(wide[0])
        with pytest.raises(RuntimeError, match=r"not torch\.float64"):
            FusedAdamW(wide, capturable=True).step()
