"""Copies of wrappers, sparse embeddings and running statistics: correct, or a clear error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ranked import LIMITS, adamw, batches, loss_of, max_difference, small, state
from stepscope.parallel import DDP, FSDP, ParallelError, World, launch
from stepscope.parallel.reducer import STRATEGIES


def error_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except ParallelError as error:
        return str(error)
    return "nothing"


def copies(_: World) -> dict[str, Any]:
    results: dict[str, Any] = {}
    ddp, fsdp = DDP(small(), "bucketed"), FSDP(small())
    x, y = next(iter(batches()))
    loss_of(ddp, x, y).backward()
    ddp.finish_gradient_synchronization()
    for name, model in (("DDP", ddp), ("FSDP", fsdp), ("FSDP.module", fsdp.module)):
        results[f"{name} deepcopy"] = error_of(lambda model=model: copy.deepcopy(model))
        results[f"{name} pickle"] = error_of(lambda model=model: pickle.dumps(model))
    average = torch.optim.swa_utils.AveragedModel(ddp.module)
    before = state(average.module)
    adamw(ddp.module).step()
    results["moved"] = max_difference(state(ddp.module), before)
    results["average"] = max_difference(state(average.module), before)
    average.update_parameters(ddp.module)
    again = DDP(copy.deepcopy(ddp.module))
    loss_of(again, x, y).backward()
    again.finish_gradient_synchronization()
    results["wrapped again"] = next(again.parameters()).grad is not None
    return results


def test_copying_a_wrapper_raises_and_its_module_can_be_copied() -> None:
    for results in launch(copies, ranks=2, limits=LIMITS):
        for kind in ("deepcopy", "pickle"):
            assert results[f"DDP {kind}"].startswith("DDP cannot be copied")
            assert "copy its .module" in results[f"DDP {kind}"]
            assert results[f"FSDP {kind}"].startswith("FSDP cannot be copied")
            assert results[f"FSDP.module {kind}"].startswith("a module wrapped by FSDP cannot be")
            assert "gather_full_params()" in results[f"FSDP {kind}"]
        assert results["moved"] > 0
        assert results["average"] == 0
        assert results["wrapped again"]


class Bagged(nn.Module):
    """An embedding whose gradient is sparse although no attribute shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 4))

    def forward(self, words: Tensor) -> Tensor:
        return nn.functional.embedding(words, self.weight, sparse=True)


def sparse(_: World) -> dict[str, str]:
    results = {}
    for name in (*STRATEGIES, "FSDP"):

        def wrap(module: nn.Module, name: str = name) -> Any:
            return FSDP(module) if name == "FSDP" else DDP(module, name)

        def used(module: nn.Module, wrap: Any = wrap) -> None:
            model = wrap(module)
            model(torch.arange(3)).sum().backward()
            model.finish_gradient_synchronization()

        results[f"{name} at wrapping"] = error_of(
            lambda wrap=wrap: wrap(nn.ModuleDict({"table": nn.Embedding(6, 4, sparse=True)}))
        )
        results[f"{name} bag"] = error_of(
            lambda wrap=wrap: wrap(nn.EmbeddingBag(6, 4, sparse=True))
        )
        results[f"{name} in the backward"] = error_of(lambda used=used: used(Bagged()))
        table = nn.Embedding(6, 4, sparse=True).requires_grad_(False)
        model = wrap(nn.Sequential(table, nn.Linear(4, 4)))
        model(torch.arange(3)).sum().backward()
        model.finish_gradient_synchronization()
        table.requires_grad_(True)
        results[f"{name} unfrozen"] = error_of(lambda model=model: model(torch.arange(3)))
    return results


def test_sparse_gradients_are_rejected_at_wrapping_or_by_name() -> None:
    for results in launch(sparse, ranks=2, limits=LIMITS):
        for name in (*STRATEGIES, "FSDP"):
            start = "table is an Embedding with sparse=True, and sparse gradients are not averaged"
            assert results[f"{name} at wrapping"].startswith(start)
            assert results[f"{name} bag"].startswith(
                "the module is an EmbeddingBag with sparse=True"
            )
            assert results[f"{name} in the backward"].startswith("the gradient of weight is sparse")
            assert results[f"{name} unfrozen"].startswith("0 is an Embedding with sparse=True")


def statistics(world: World) -> dict[str, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    results: dict[str, Any] = {}
    for compute in (None, torch.bfloat16):
        model = FSDP(copy.deepcopy(module), compute)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            torch.manual_seed(10 * step + world.rank)
            model(torch.randn(5, 4)).float().pow(2).mean().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
        entries = model.state_dict()
        results[f"{compute}"] = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
            for name, value in entries.items()
        }
        results[f"{compute} shapes"] = {name: tuple(v.shape) for name, v in entries.items()}
    full = {name.removeprefix("module."): value for name, value in results["None"].items()}
    plain = copy.deepcopy(module)
    plain.load_state_dict(full)
    others = FSDP(copy.deepcopy(module))
    others.module.load_state_dict(full)
    results["loaded"] = max_difference(others.gather_full_params(), dict(plain.named_parameters()))
    others.load_state_dict(entries)
    results["loaded again"] = max_difference(
        others.gather_full_params(), model.gather_full_params()
    )
    return results


def test_state_dict_does_not_depend_on_the_rank() -> None:
    first, second = launch(statistics, ranks=2, limits=LIMITS)
    for compute in ("None", "torch.bfloat16"):
        assert max_difference(first[compute], second[compute]) == 0.0
        assert first[compute]["module.1.num_batches_tracked"] == 3
        assert first[compute]["module.1.running_mean"].abs().max() > 0
        assert first[f"{compute} shapes"] == second[f"{compute} shapes"]
        assert first[f"{compute} shapes"]["module.0.weight"] == (6, 4)
    for results in (first, second):
        assert results["loaded"] == 0.0
        assert results["loaded again"] == 0.0
