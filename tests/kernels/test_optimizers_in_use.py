"""Optimizers in use: copies, tensor learning rates, added parameters, loaded states."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from test_joined_model import DEVICE, HALF, batch, draw, model
from torch import Tensor, nn

from stepscope.kernels.weight_copies import WeightCopies
from stepscope.optim import AdamW, FusedAdamW, InBackwardAdamW, MasterWeights

KINDS: dict[str, Any] = {
    "plain": AdamW,
    "fused": FusedAdamW,
    "capturable": lambda p, **how: FusedAdamW(p, capturable=True, **how),
    "in backward": InBackwardAdamW,
    "master": lambda p, **how: MasterWeights(p, AdamW, **how),
}


def step(optimizer: torch.optim.Optimizer, *parameters: Tensor) -> None:
    loss: Any = sum((p * torch.arange(1.0, 4.0, device=p.device)).sum() for p in parameters)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def three_ones() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, device=DEVICE))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_continues_like_the_original(kind: str, how: str) -> None:
    weight = three_ones()
    optimizer = KINDS[kind]([weight], lr=0.1)
    step(optimizer, weight)
    pair = (weight, optimizer)
    weight_copy, optimizer_copy = (
        copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    )
    for _ in range(2):
        step(optimizer, weight)
        step(optimizer_copy, weight_copy)
    torch.testing.assert_close(weight_copy, weight, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_learning_rate_may_change_in_place(kind: str) -> None:
    weight = three_ones()
    optimizer = KINDS[kind]([weight], lr=torch.tensor(0.1), weight_decay=0.0)
    moved = []
    for _ in range(3):
        before = weight.detach().clone()
        step(optimizer, weight)
        moved.append(float((before - weight.detach())[0]))
        optimizer.param_groups[0]["lr"].mul_(0.1)
    assert moved == pytest.approx([0.1, 0.01, 0.001], rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_counts_only_for_parameters_with_a_gradient(kind: str) -> None:
    weight, late = three_ones(), three_ones()
    optimizer = KINDS[kind]([weight, late], lr=0.1, weight_decay=0.0)
    for _ in range(20):
        step(optimizer, weight)
    before = late.detach().clone()
    step(optimizer, weight, late)
    torch.testing.assert_close(
        before - late.detach(), torch.full_like(before, 0.1), rtol=1e-5, atol=0
    )
    assert [float(optimizer.state[p]["step"]) for p in (weight, late)] == [21, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_may_be_added_later(kind: str) -> None:
    weight, late = three_ones(), three_ones()
    optimizer = KINDS[kind]([weight], lr=0.1)
    optimizer.step()
    step(optimizer, weight)
    optimizer.add_param_group({"params": [late], "lr": 0.2})
    step(optimizer, weight, late)
    plain, other = three_ones(), three_ones()
    expected = torch.optim.AdamW([plain], lr=0.1)
    step(expected, plain)
    expected.add_param_group({"params": [other], "lr": 0.2})
    step(expected, plain, other)
    torch.testing.assert_close([weight, late], [plain, other], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["plain", "fused", "capturable", "in backward"])
def test_unsupported_options_raise_before_anything_changes(kind: str) -> None:
    weight = three_ones()
    optimizer = KINDS[kind]([weight], lr=0.1)
    other = torch.optim.AdamW([three_ones()], lr=0.7, amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad=True is not supported"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="maximize=True is not supported"):
        optimizer.add_param_group({"params": [three_ones()], "maximize": True})
    with pytest.raises(ValueError, match="supports real parameters only"):
        KINDS[kind]([nn.Parameter(torch.ones(2, dtype=torch.complex64))])


@pytest.mark.parametrize("kind", ["plain", "fused", "capturable", "in backward"])
def test_a_loaded_step_count_may_be_a_number(kind: str) -> None:
    weight, plain = three_ones(), three_ones()
    old = torch.optim.AdamW([plain], lr=0.1)
    step(old, plain)
    state = copy.deepcopy(old.state_dict())
    state["state"][0]["step"] = 1
    optimizer = KINDS[kind]([weight], lr=0.1)
    with torch.no_grad():
        weight.copy_(plain)
    optimizer.load_state_dict(state)
    step(optimizer, weight)
    step(old, plain)
    torch.testing.assert_close(weight, plain, rtol=1e-6, atol=0)


def test_after_load_state_dict_a_captured_step_uses_the_new_groups() -> None:
    weight = three_ones()
    optimizer = FusedAdamW([weight], lr=0.1, weight_decay=0.0, capturable=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.refresh()
    before = weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before, rtol=0, atol=0)


def test_stochastic_moments_support_non_contiguous_gradients() -> None:
    if DEVICE == "cpu":
        pytest.skip("the interpreter computes bfloat16 incorrectly")
    weight = nn.Parameter(torch.ones(4, 6, device=DEVICE))
    optimizer = FusedAdamW([weight], stochastic_bfloat16_state=True)
    for gradient in (torch.ones(4, 6, device=DEVICE), torch.ones(6, 4, device=DEVICE).T):
        weight.grad = gradient
        optimizer.step()
    assert float(optimizer.state[weight]["step"]) == 2


def test_sparse_gradients_raise() -> None:
    table = nn.Embedding(5, 3, sparse=True, device=DEVICE)
    optimizer = InBackwardAdamW(table.parameters())
    with pytest.raises(RuntimeError, match="needs dense gradients"):
        table(torch.tensor([1, 2], device=DEVICE)).sum().backward()
    del optimizer


class TestCopies:
    def test_both_copies_of_a_tied_weight_are_updated(self) -> None:
        subject = model(fused=True, fused_projections=True)
        for block in subject.blocks:
            block.attention.key.weight = block.attention.query.weight  # type: ignore[union-attr]
        optimizer = FusedAdamW(subject.parameters(), lr=3e-2, copies=subject.copies)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, HALF):
                subject(*batch()).backward()
            optimizer.step()
        weight = subject.blocks[0].attention.query.weight  # type: ignore[union-attr]
        assert subject.copies.find(weight) is None
        with torch.autocast(DEVICE, HALF):
            subject(*batch())
        for group in subject.copies._groups.values():
            for row, source in zip(group.rows, group.weights() or (), strict=True):
                torch.testing.assert_close(row, source.detach().to(HALF), rtol=0, atol=0)

    def test_other_copies_of_the_same_weights_are_updated(self) -> None:
        weight, own, other = nn.Parameter(draw(4, 4)), WeightCopies(), WeightCopies()
        optimizer = FusedAdamW([weight], lr=0.1, copies=own)
        for copies in (own, other):
            copies.narrow((weight,), HALF)
        weight.grad = draw(4, 4)
        optimizer.step()
        for copies in (own, other):
            (narrow,) = copies.narrow((weight,), HALF)
            torch.testing.assert_close(narrow, weight.detach().to(HALF), rtol=0, atol=0)

    def test_a_new_weight_with_a_reused_id_has_no_copy(self) -> None:
        copies, weights = WeightCopies(), []
        for _ in range(50):
            copies.narrow((nn.Parameter(draw(4, 4)),), HALF)
            # A full collection visits all modules of all tests, for 0.15 s.
            gc.collect(1)
            weights.append(nn.Parameter(draw(5, 5)))
            assert copies.find(weights[-1]) is None

    def test_in_inference_mode_weights_are_cast_again(self) -> None:
        with torch.inference_mode(), torch.autocast(DEVICE, HALF):
            subject = model(fused=True, fused_projections=True)
            first = subject(*batch())
            torch.testing.assert_close(subject(*batch()), first, rtol=0, atol=0)
