"""Weights under FSDP that are tied, read elsewhere, clipped, or changed between two forwards."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from ranked import LIMITS, max_difference, state
from stepscope.parallel import FSDP, ParallelError, World, launch, load_training, save_training

WORDS = torch.arange(8)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 4, dtype=torch.float64)
        self.body = nn.Linear(4, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 8, bias=False, dtype=torch.float64)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.table(words)))
        return out


class Reading(Tied):
    """Reads a weight outside the forward of the module that owns it."""

    def forward(self, words: Tensor) -> Tensor:
        return linear(self.body(self.table(words)), self.table.weight)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(4, 4))])


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.two = self.one

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.one) @ self.two


class Calling(nn.Module):
    """Calls itself once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        inner: Tensor = self(x, again=False) if again else x
        return torch.tanh(inner @ self.weight)


def trained(model: FSDP, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).pow(2).sum().backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()


def difference(model: FSDP, plain: nn.Module, x: Tensor) -> float:
    """Difference between a forward and that of the same weights in one process."""
    full = copy.deepcopy(plain)
    full.load_state_dict(model.gather_full_params(), strict=False)
    with torch.no_grad():
        return float((model(x) - full(x)).abs().max())


def after_changes(_: World, folder: str) -> dict[str, float]:
    differences = {}
    model = FSDP(Tied())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_training(model, optimizer, f"{folder}/saved")
    trained(model, optimizer, WORDS)
    with torch.no_grad():
        model(WORDS)
    load_training(model, optimizer, f"{folder}/saved")
    differences["loaded"] = difference(model, Tied(), WORDS)
    model(WORDS).pow(2).sum().backward()
    model.finish_gradient_synchronization()
    with torch.no_grad():
        model(WORDS)
    optimizer.step()
    differences["evaluated before the step"] = difference(model, Tied(), WORDS)
    with torch.inference_mode():
        model(WORDS)
    optimizer.zero_grad()
    trained(model, optimizer, WORDS)
    differences["inferred before"] = difference(model, Tied(), WORDS)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model = FSDP(copy.deepcopy(plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    model(x).pow(2).sum().backward()
    model.finish_gradient_synchronization()
    torch.autograd.grad(model(x).sum(), x)
    optimizer.step()
    differences["only the input's gradient"] = difference(model, plain, x)
    return differences


def test_a_forward_uses_the_current_weights(tmp_path: Path) -> None:
    for differences in launch(after_changes, (str(tmp_path),), ranks=2, limits=LIMITS):
        assert set(differences.values()) == {0.0}, differences


def unusual(world: World) -> dict[str, Any]:
    results: dict[str, Any] = {}
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    for module in (TwoNames(), Calling()):
        model = FSDP(copy.deepcopy(module))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained(model, optimizer, x[world.rank :: world.size])
        (module(x).pow(2).sum() / world.size).backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        name = type(module).__name__
        results[name] = max_difference(model.gather_full_params(), dict(module.named_parameters()))
    for wrong in (Reading(), Listed()):
        try:
            FSDP(wrong)(WORDS).sum().backward()
        except ParallelError as error:
            results[type(wrong).__name__] = str(error)
    return results


def test_weights_with_two_names_and_recursive_modules_are_full() -> None:
    for results in launch(unusual, ranks=2, limits=LIMITS):
        assert results["TwoNames"] <= 1e-14
        assert results["Calling"] <= 1e-14
        assert results["Reading"].startswith("table.weight was read outside the forward of its own")
        assert results["Listed"].startswith("weights is a ParameterList, whose weights are read by")


def clipped(world: World, norm_type: float) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
    model(x[world.rank :: world.size]).pow(2).mean().backward()
    with pytest.raises(ParallelError, match="before they are averaged"):
        model.clip_grad_norm_(0.1, norm_type)
    model.finish_gradient_synchronization()
    norm = model.clip_grad_norm_(0.1, norm_type)
    optimizer.step()
    return norm.item(), model.gather_full_params()


def clipped_norms(world: World) -> list[tuple[float, dict[str, Tensor]]]:
    return [clipped(world, norm_type) for norm_type in (2.0, 1.0, math.inf)]


def test_gradients_are_clipped_by_the_global_norm() -> None:
    """Three ranks, of which the last has no rows of the last matrix."""
    results = launch(clipped_norms, ranks=3, limits=LIMITS)
    for number, norm_type in enumerate((2.0, 1.0, math.inf)):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)).double()
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
        plain(x).pow(2).mean().backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        torch.optim.SGD(plain.parameters(), lr=1.0).step()
        for norm, weights in (rank[number] for rank in results):
            assert abs(norm - float(expected)) <= 1e-12
            assert max_difference(weights, state(plain)) <= 1e-12


def frozen_matrices(_: World) -> str:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.dim() < 2)
    model = FSDP(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    try:
        optimizer.step()
    except ParallelError as error:
        message = str(error)
    model.finish_gradient_synchronization()
    optimizer.step()
    return message


def test_pending_replicated_gradients_block_the_optimizer() -> None:
    for message in launch(frozen_matrices, ranks=2, limits=LIMITS):
        assert message.startswith("finish_gradient_synchronization was not called")


def checkpoints(world: World, folder: str) -> dict[str, Any]:
    own = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    results: dict[str, Any] = {}
    alone = FSDP(nn.Linear(4, 4), group=own)
    optimizer = torch.optim.AdamW(alone.parameters())
    before = alone.gather_full_params()
    save_training(alone, optimizer, f"{folder}/own-{world.rank}")
    trained(alone, optimizer, torch.ones(2, 4))
    load_training(alone, optimizer, f"{folder}/own-{world.rank}")
    results["own group"] = max_difference(alone.gather_full_params(), before)
    results["moments"] = len(optimizer.state)
    groups = [{"params": [p]} for p in alone.parameters()]
    trained(alone, optimizer, torch.ones(2, 4))
    changed = alone.gather_full_params()
    try:
        load_training(alone, torch.optim.AdamW(groups), f"{folder}/own-{world.rank}")
    except ParallelError as error:
        results["other groups"] = str(error)
    results["untouched"] = max_difference(alone.gather_full_params(), changed)
    metadata = Path(folder) / f"own-{world.rank}" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[: metadata.stat().st_size // 2])
    try:
        load_training(alone, optimizer, metadata.parent)
    except ParallelError as error:
        results["damaged"] = str(error)
    return results


def test_checkpoints_of_subgroups_and_mismatches(tmp_path: Path) -> None:
    for results in launch(checkpoints, (str(tmp_path),), ranks=2, limits=LIMITS):
        assert results["own group"] == 0.0
        assert results["moments"] == 0
        assert "1 parameter groups, here 2" in results["other groups"]
        assert results["untouched"] == 0.0
        assert ".metadata is damaged: its checksum does not match" in results["damaged"]
