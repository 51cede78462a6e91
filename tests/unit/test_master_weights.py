"""Float32 master weights around an optimizer: the same rule, on copies that do not round."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from stepscope.optim import AdamW, MasterWeights


def model_of(dtype: torch.dtype) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(6, 5, dtype=dtype)


def set_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator).bfloat16()
        parameter.grad = drawn.to(parameter.dtype)


@pytest.mark.parametrize("kind", [AdamW, torch.optim.AdamW, torch.optim.SGD])
def test_the_model_is_the_float32_training_rounded(kind: Any) -> None:
    narrow, wide = model_of(torch.bfloat16), model_of(torch.bfloat16).float()
    with_copies = MasterWeights(narrow.parameters(), kind, lr=3e-4)
    plain = kind(wide.parameters(), lr=3e-4)
    for seed in range(5):
        set_gradients(narrow, seed)
        set_gradients(wide, seed)
        with_copies.step()
        plain.step()
    for a, b in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert torch.equal(with_copies.state[a]["master"], b)
        assert torch.equal(a, b.bfloat16())


def test_updates_too_small_for_bfloat16_add_up() -> None:
    """A hundred steps of a thousandth of the weight's last place."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    pure = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    with_copies = MasterWeights([weight], torch.optim.SGD, lr=1e-4)
    without = torch.optim.SGD([pure], lr=1e-4)
    for _ in range(100):
        weight.grad = pure.grad = torch.ones(3, dtype=torch.bfloat16)
        with_copies.step()
        without.step()
    assert pure.tolist() == [1.0] * 3
    assert with_copies.state[weight]["master"].tolist() == pytest.approx([0.99] * 3, rel=1e-5)
    assert weight.tolist() == [0.98828125] * 3


def test_state_survives_being_saved_and_loaded() -> None:
    first = model_of(torch.bfloat16)
    optimizer = MasterWeights(first.parameters(), torch.optim.AdamW, lr=1e-3)
    for seed in range(3):
        set_gradients(first, seed)
        optimizer.step()
    second = copy.deepcopy(first)
    again = MasterWeights(second.parameters(), torch.optim.AdamW, lr=5e-2)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert again.param_groups[0]["lr"] == 1e-3
    for parameter in second.parameters():
        assert {held.dtype for held in again.state[parameter].values()} == {torch.float32}
    for model, each in ((first, optimizer), (second, again)):
        set_gradients(model, 9)
        each.step()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(optimizer.state[a]["master"], again.state[b]["master"])


def test_a_scheduler_moves_the_rate_of_the_copies() -> None:
    model = model_of(torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)
    set_gradients(model, 0)
    optimizer.step()
    scheduler.step()
    before = [p.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_parameters_without_gradient_stay() -> None:
    model = model_of(torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), AdamW)
    set_gradients(model, 0)
    model.bias.grad = None
    before = model.bias.clone()
    optimizer.step()
    assert torch.equal(model.bias, before)
    assert model.bias not in optimizer.state
