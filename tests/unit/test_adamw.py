"""AdamW against torch.optim.AdamW, step by step, and against a step computed by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from stepscope.optim import AdamW


def small_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)


def two_groups(model: nn.Module) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": matrices, "weight_decay": 0.3, "betas": (0.8, 0.95)},
        {"params": vectors, "weight_decay": 0.0, "lr": 3e-3, "eps": 1e-6},
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(start, start + steps):
        x = torch.randn(5, 6, dtype=dtype, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def assert_same(ours: nn.Module, theirs: nn.Module, tolerance: float) -> None:
    torch.testing.assert_close(
        list(ours.parameters()), list(theirs.parameters()), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize("grouped", [False, True])
def test_hundred_steps_match_torch(dtype: torch.dtype, tolerance: float, grouped: bool) -> None:
    ours, theirs = small_model(dtype), small_model(dtype)
    start = copy.deepcopy(ours)
    params = two_groups if grouped else nn.Module.parameters
    train(ours, AdamW(params(ours)), 100)
    train(theirs, torch.optim.AdamW(params(theirs), foreach=False), 100)
    assert_same(ours, theirs, tolerance)
    with pytest.raises(AssertionError):
        assert_same(ours, start, 1e-3)


def test_first_step_by_hand() -> None:
    # At step 1 the corrected moments are g and g², so the step is lr · g / (|g| + eps).
    weight = nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    weight.grad = torch.tensor([0.5, 4.0], dtype=torch.float64)
    AdamW([weight], lr=0.1, eps=0.25, weight_decay=0.2).step()
    expected = [2.0 * 0.98 - 0.1 * 0.5 / 0.75, -1.0 * 0.98 - 0.1 * 4.0 / 4.25]
    assert weight.tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("first", "second"), [(AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW), (AdamW, AdamW)]
)
def test_state_loads_between_ours_and_torch(
    first: type[torch.optim.Optimizer], second: type[torch.optim.Optimizer]
) -> None:
    model = small_model()
    optimizer = first(two_groups(model))
    train(model, optimizer, 20)
    moved = copy.deepcopy(model)
    successor = second(two_groups(moved), lr=0.7)
    successor.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 20, start=20)
    train(moved, successor, 20, start=20)
    assert_same(moved, model, 1e-13)
    steps = {float(state["step"]) for state in successor.state.values()}
    assert steps == {40.0}


def test_state_has_the_keys_and_dtypes_of_torch() -> None:
    model = small_model(torch.bfloat16)
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    for parameter, state in optimizer.state.items():
        assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == parameter.dtype


def test_a_parameter_without_gradient_is_unchanged() -> None:
    used, unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
    used.grad = torch.ones(3)
    optimizer = AdamW([used, unused])
    optimizer.step()
    assert unused.tolist() == [1.0, 1.0, 1.0]
    assert unused not in optimizer.state
    assert used.tolist() != [1.0, 1.0, 1.0]


def test_closure_runs_with_gradients_enabled_and_returns_its_loss() -> None:
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = AdamW([weight], lr=0.1, weight_decay=0.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return float(loss)

    assert optimizer.step(closure) == 9.0
    assert float(weight) == pytest.approx(2.9)


def test_converges_to_the_minimum() -> None:
    weight = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = AdamW([weight], lr=0.05, weight_decay=0.0)
    for _ in range(500):
        optimizer.zero_grad()
        (weight - 1).square().sum().backward()
        optimizer.step()
    assert weight.tolist() == pytest.approx([1.0, 1.0], abs=1e-3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"betas": (1.0, 0.999)}, r"betas\[0\] is 1.0"),
        ({"betas": (0.9, -0.5)}, r"betas\[1\] is -0.5"),
    ],
)
def test_invalid_hyperparameters_raise(bad: dict[str, object], message: str) -> None:
    parameter = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=message):
        AdamW([parameter], **bad)
    with pytest.raises(ValueError, match=message):
        AdamW([{"params": [parameter], **bad}])


def test_sparse_gradients_raise() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="dense gradients"):
        AdamW(embedding.parameters()).step()


def test_state_of_an_unsupported_variant_raises() -> None:
    model = small_model()
    other = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train(model, other, 1)
    with pytest.raises(ValueError, match="amsgrad=True"):
        AdamW(model.parameters()).load_state_dict(other.state_dict())
