"""Float32 master weights around an optimizer: the same rule, on unrounded copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from stepscope.optim import AdamW, FusedAdamW, InBackwardAdamW, MasterWeights


def model_of(dtype: torch.dtype) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(6, 5, dtype=dtype)


def set_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator).bfloat16()
        parameter.grad = drawn.to(parameter.dtype)


@pytest.mark.parametrize("kind", [AdamW, torch.optim.AdamW, torch.optim.SGD])
def test_the_model_is_the_rounded_float32_training(kind: Any) -> None:
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


def test_updates_too_small_for_bfloat16_accumulate() -> None:
    """A hundred steps, each of a fraction of the weight's last place."""
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


def test_state_dict_round_trip() -> None:
    first = model_of(torch.bfloat16)
    optimizer = MasterWeights(first.parameters(), torch.optim.AdamW, lr=1e-3)
    for seed in range(3):
        set_gradients(first, seed)
        optimizer.step()
    second = copy.deepcopy(first)
    loaded = MasterWeights(second.parameters(), torch.optim.AdamW, lr=5e-2)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert loaded.param_groups[0]["lr"] == 1e-3
    for parameter in second.parameters():
        assert {value.dtype for value in loaded.state[parameter].values()} == {torch.float32}
    for model, each_optimizer in ((first, optimizer), (second, loaded)):
        set_gradients(model, 9)
        each_optimizer.step()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(optimizer.state[a]["master"], loaded.state[b]["master"])


def test_a_scheduler_changes_the_learning_rate_of_the_copies() -> None:
    model = model_of(torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)
    set_gradients(model, 0)
    optimizer.step()
    scheduler.step()
    before = [p.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_parameters_without_gradient_are_unchanged() -> None:
    model = model_of(torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), AdamW)
    set_gradients(model, 0)
    model.bias.grad = None
    before = model.bias.clone()
    optimizer.step()
    assert torch.equal(model.bias, before)
    assert model.bias not in optimizer.state


@pytest.fixture(params=["kernel", "naive"])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel in the interpreter, which supports float16; or the naive version."""
    if request.param == "naive":
        for module in ("in_backward", "fused"):
            monkeypatch.setattr(f"stepscope.optim.{module}.kernel_takes", lambda *_: False)
    return str(request.param)


@pytest.mark.usefixtures("variant")
def test_fused_adamw_matches() -> None:
    models = [model_of(torch.float16) for _ in range(2)]
    around = MasterWeights(models[0].parameters(), AdamW, lr=1e-3)
    fused = FusedAdamW(models[1].parameters(), lr=1e-3, master=True)
    for seed in range(4):
        for model, optimizer in zip(models, (around, fused), strict=True):
            set_gradients(model, seed)
            optimizer.step()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        expected, actual = around.state[a], fused.state[b]
        assert set(expected) == set(actual)
        assert {tensor.dtype for tensor in actual.values()} == {torch.float32}
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-7)
        assert torch.equal(b, actual["master"].half())


@pytest.mark.usefixtures("variant")
def test_in_backward_adamw_matches() -> None:
    x = torch.randn(3, 6, dtype=torch.float16)
    models = [model_of(torch.float16) for _ in range(2)]
    after = FusedAdamW(models[0].parameters(), lr=1e-2, master=True)
    within = InBackwardAdamW(models[1].parameters(), lr=1e-2, master=True)
    for _ in range(3):
        for model, optimizer in zip(models, (after, within), strict=True):
            model(x).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(after.state[a]["master"], within.state[b]["master"])


@pytest.mark.usefixtures("variant")
def test_state_loads_into_fused_adamw_without_rounding() -> None:
    first, second = model_of(torch.float16), model_of(torch.float16)
    around = MasterWeights(first.parameters(), AdamW, lr=1e-3)
    for seed in range(3):
        set_gradients(first, seed)
        around.step()
    second.load_state_dict(first.state_dict())
    fused = FusedAdamW(second.parameters(), lr=1e-3, master=True)
    fused.load_state_dict(copy.deepcopy(around.state_dict()))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(fused.state[b]["master"], around.state[a]["master"])
        assert torch.equal(fused.state[b]["exp_avg"], around.state[a]["exp_avg"])
    for model, optimizer in ((first, around), (second, fused)):
        set_gradients(model, 9)
        optimizer.step()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_float32_parameters_have_no_master_copy() -> None:
    plain, with_masters = model_of(torch.float32), model_of(torch.float32)
    for model, optimizer in (
        (plain, FusedAdamW(plain.parameters(), lr=1e-3)),
        (with_masters, FusedAdamW(with_masters.parameters(), lr=1e-3, master=True)),
    ):
        set_gradients(model, 0)
        optimizer.step()
        assert all("master" not in state for state in optimizer.state.values())
    for a, b in zip(plain.parameters(), with_masters.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="float32"):
        FusedAdamW(plain.parameters(), master=True, stochastic_bfloat16_state=True)


def test_a_loaded_float64_state_is_not_rounded() -> None:
    models = [model_of(torch.float64) for _ in range(2)]
    first, second = (FusedAdamW(model.parameters(), master=True) for model in models)
    set_gradients(models[0], 0)
    first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first.state[a]["exp_avg_sq"], second.state[b]["exp_avg_sq"])
        assert second.state[b]["exp_avg_sq"].dtype == torch.float64
