"""`accelerate(compile=True)` with FSDP2 and DDP: ranks train as one process does, and alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sharded_cases
import stepscope
from sharded_cases import CASES, FIXED, FOUR, Case, Result, alone, batch, trained
from small_decoder import Decoder, adamw, decoder
from stepscope.acceleration import choice, compiled
from stepscope.parallel import Limits, World, launch

LIMITS = Limits(start=300.0, step=300.0, beat=120.0, total=3600.0)
CPU = torch.device("cpu")
Results = dict[str, Result]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
    torch._dynamo.reset()


def train_all(world: World, cases: dict[str, Case]) -> Results:
    return {name: trained(world, case, compile=FIXED) for name, case in cases.items()}


@pytest.fixture(scope="module")
def two() -> list[Results]:
    return launch(train_all, (CASES,), ranks=2, limits=LIMITS)


@pytest.fixture(scope="module")
def four() -> list[Results]:
    return launch(train_all, (FOUR,), ranks=4, limits=LIMITS)


@cache
def expected(accumulate: int, max_norm: float | None, varied: bool, ranks: int) -> list[Result]:
    case = Case(sharded_cases.fsdp2, accumulate, max_norm, varied=varied)
    return alone(case, ranks, CPU, compile=FIXED)


def require_as_alone(ranks: list[Results], name: str, case: Case) -> None:
    alone = expected(case.accumulate, case.max_norm, case.varied, len(ranks))
    for rank, wanted in zip(ranks, alone, strict=True):
        found, tolerance = rank[name], case.tolerance
        assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
        if found.norms:
            assert found.norms == pytest.approx(wanted.norms, rel=tolerance)
        for parameter, value in wanted.parameters.items():
            difference = (found.parameters[parameter] - value).norm()
            assert difference <= tolerance * value.norm(), parameter
            assert torch.equal(found.parameters[parameter], ranks[0][name].parameters[parameter])


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process_does(two: list[Results], name: str) -> None:
    require_as_alone(two, name, CASES[name])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_one_process_does(four: list[Results], name: str) -> None:
    require_as_alone(four, name, FOUR[name])


@pytest.mark.parametrize("name", set(CASES) - {"checkpointed by the model"})
def test_blocks_head_and_loss_have_passes(two: list[Results], name: str) -> None:
    report = two[0][name].report
    assert "SDPA, causal" in report
    assert "head and loss         1 × no logits" in report
    assert "compile  " not in report, report


def test_a_call_of_a_unit_in_a_checkpoint_is_left(two: list[Results]) -> None:
    report = two[0]["checkpointed by the model"].report
    assert "SDPA, causal" in report
    assert "cannot be split: it calls tag_activation_checkpoint" in report


# Checkpoints


def save(world: World, folder: str, accelerated: bool) -> list[float]:
    """Train three steps, save, and return the losses of three more."""
    model, optimizer = prepared(world, accelerated)
    some_steps(world, model, optimizer, range(3))
    states = get_state_dict(model, optimizer)
    checkpoint.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    return some_steps(world, model, optimizer, range(3, 6))


def load(world: World, folder: str, accelerated: bool) -> list[float]:
    """Load what was saved, and return the losses of three more steps."""
    model, optimizer = prepared(world, accelerated)
    states = get_state_dict(model, optimizer)
    found = {"model": states[0], "optimizer": states[1]}
    checkpoint.load(found, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    return some_steps(world, model, optimizer, range(3, 6))


def prepared(world: World, accelerated: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch._dynamo.reset()
    model = sharded_cases.fsdp2(decoder(tied=False), world)
    optimizer = adamw(model)
    if accelerated:
        stepscope.accelerate(model, optimizer, compile=FIXED)
    return model, optimizer


def some_steps(
    world: World, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> list[float]:
    """All ranks have the same batch: their number does not change the losses."""
    losses = []
    for step in steps:
        world.step(step)
        loss = model(*batch(CASES["fsdp2"], step, 0, world.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_checkpoints_load_with_and_without_it_and_on_other_ranks(tmp_path: Path) -> None:
    for accelerated in (True, False):
        folder = str(tmp_path / str(accelerated))
        continued = launch(save, (folder, accelerated), ranks=2, limits=LIMITS)[0]
        for ranks, other in ((2, not accelerated), (4, accelerated)):
            loaded = launch(load, (folder, other), ranks=ranks, limits=LIMITS)[0]
            assert loaded == pytest.approx(continued, rel=1e-4)


# The choice, refusals, undo


def many(world: World) -> dict[str, Any]:
    return {
        "choice": chosen(world),
        "refusal": refused_on_one_rank(world),
        "undo": undone(world),
        "tensor parallel": tensor_parallel(world),
    }


@pytest.fixture(scope="module")
def facts() -> list[dict[str, Any]]:
    return launch(many, ranks=2, limits=LIMITS)


def chosen(world: World) -> tuple[str, list[float]]:
    choice.SAMPLES = 3
    case = CASES["weights kept"]
    result = trained(world, case, compile={"compiler": "aot_eager"})
    form = re.search(r"form of the step   ([a-z ]*)", result.report)
    assert form is not None
    return form[1], result.losses


def test_ranks_choose_the_same_form(facts: list[dict[str, Any]]) -> None:
    forms = {rank["choice"][0].strip() for rank in facts}
    assert len(forms) == 1
    assert forms <= {*compiled.FORMS}
    for rank, wanted in zip(facts, expected(1, None, False, 2), strict=True):
        assert rank["choice"][1] == pytest.approx(wanted.losses, rel=1e-4)


def refused_on_one_rank(world: World) -> str:
    """Train, with blocks that differ on the last rank."""
    original: Callable[..., str] = compiled.difference

    def difference(module: nn.Module, *args: Any, **kwargs: Any) -> str:
        differs = world.rank == 1 and not isinstance(module, Decoder)
        return "planted" if differs else original(module, *args, **kwargs)

    compiled.difference = difference
    try:
        return trained(world, CASES["weights kept"], 3, compile=FIXED).report
    finally:
        compiled.difference = original


def test_what_one_rank_refuses_is_refused_on_all(facts: list[dict[str, Any]]) -> None:
    assert "planted" in facts[1]["refusal"]
    assert "differs from the original on another rank" in facts[0]["refusal"]
    for rank in facts:
        assert "SDPA" not in rank["refusal"]
        assert "head and loss         1 × no logits" in rank["refusal"]


def undone(world: World) -> dict[str, Any]:
    torch._dynamo.reset()
    model = sharded_cases.fsdp2(decoder(tied=False), world)
    kinds = [type(one) for one in model.modules()]
    optimizer = adamw(model)
    report = stepscope.accelerate(model, optimizer, compile=FIXED)
    some_steps(world, model, optimizer, range(2))
    with torch.no_grad():
        evaluated = float(model(*batch(CASES["fsdp2"], 0, 0, world.device)))
    report.undo()
    return {
        "same classes": [type(one) for one in model.modules()] == kinds,
        "forwards": [name for name, one in model.named_modules() if "forward" in vars(one)],
        "losses": some_steps(world, model, optimizer, range(2, 4)),
        "evaluated": evaluated,
        "again": str(stepscope.accelerate(model, optimizer, compile=FIXED)),
    }


def test_undo_restores_the_model(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        found = rank["undo"]
        assert found["same classes"]
        assert found["forwards"] == []
        assert all(0.0 < loss < 5.0 for loss in (*found["losses"], found["evaluated"]))
        assert "form of the step" in found["again"]


def tensor_parallel(world: World) -> str:
    model = decoder(tied=False)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for layer in model.layers:
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(),
                "down_proj": RowwiseParallel()}  # fmt: skip
        parallelize_module(layer.mlp, mesh, plan)
    return str(stepscope.accelerate(model, compile=FIXED))


def test_tensor_parallel_models_are_left(facts: list[dict[str, Any]]) -> None:
    assert "tensor parallelism" in facts[0]["tensor parallel"]
