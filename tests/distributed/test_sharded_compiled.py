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
from sharded_cases import CASES, FIXED, FOUR, STEPS, Case, Result, Training, alone, batch, trained
from small_decoder import Decoder, adamw, decoder
from stepscope.acceleration import choice, compiled
from stepscope.parallel import Limits, World, launch

LIMITS = Limits(start=300.0, step=300.0, beat=120.0, total=3600.0)
CPU = torch.device("cpu")
Results = dict[str, Result]
Found = tuple[Path, list[dict[str, Any]]]
SAVED = "accumulation and clipping"
MAIN = (SAVED, "DDP with views")
REST = tuple(sorted(set(CASES) - set(MAIN)))
FEW_STEPS = 8
"""AdamW divides by the size of gradients: in these steps a wrong one moves the losses apart."""


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
    torch._dynamo.reset()


def train_all(world: World, cases: dict[str, Case], steps: int) -> Results:
    return {name: trained(world, case, steps, compile=FIXED) for name, case in cases.items()}


@cache
def expected(
    accumulate: int, max_norm: float | None, varied: bool, ranks: int, steps: int
) -> list[Result]:
    """What the plain model sees in one process."""
    return alone(Case(sharded_cases.fsdp2, accumulate, max_norm, varied=varied), ranks, CPU, steps)


def require_as_alone(ranks: list[Results], name: str, case: Case) -> None:
    steps = len(ranks[0][name].losses)
    alone = expected(case.accumulate, case.max_norm, case.varied, len(ranks), steps)
    for rank, wanted in zip(ranks, alone, strict=True):
        found, tolerance = rank[name], case.tolerance
        assert found.losses == pytest.approx(wanted.losses, rel=tolerance), name
        if found.norms:
            assert found.norms == pytest.approx(wanted.norms, rel=tolerance), name
        for parameter, value in wanted.parameters.items():
            difference = (found.parameters[parameter] - value).norm()
            assert difference <= tolerance * value.norm(), (name, parameter)
            assert torch.equal(found.parameters[parameter], ranks[0][name].parameters[parameter])


def require_passes(name: str, report: str) -> None:
    assert "SDPA, causal" in report, name
    if name == "checkpointed by the model":
        assert "cannot be split: it calls tag_activation_checkpoint" in report
        return
    assert "head and loss         1 × no logits" in report, name
    assert "compile  " not in report, report


@pytest.mark.thorough
def test_the_other_cases_train_as_one_process_does() -> None:
    cases = {name: CASES[name] for name in REST}
    require_cases(launch(train_all, (cases, FEW_STEPS), ranks=2, limits=LIMITS), cases)


@pytest.mark.thorough
def test_four_ranks_train_as_one_process_does() -> None:
    four = launch(train_all, (FOUR, FEW_STEPS), ranks=4, limits=LIMITS)
    for name, case in FOUR.items():
        require_as_alone(four, name, case)


def require_cases(ranks: list[Results], cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        require_as_alone(ranks, name, case)
        require_passes(name, ranks[0][name].report)


# One launch of two ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What two ranks find in one launch, as its processes compile each case for some seconds; and
    the folder of their checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, launch(found, (str(folder),), ranks=2, limits=LIMITS)


def found(world: World, folder: str) -> dict[str, Any]:
    saved, undo = saved_and_undone(world, folder)
    others = {name: CASES[name] for name in MAIN if name != SAVED}
    return {
        "trained": train_all(world, others, FEW_STEPS) | {SAVED: saved},
        "undo": undo,
        "choice": chosen(world),
        "refusal": refused_on_one_rank(world),
        "tensor parallel": tensor_parallel(world),
    }


def test_two_ranks_train_as_one_process_does(two: Found) -> None:
    require_cases([rank["trained"] for rank in two[1]], {name: CASES[name] for name in MAIN})


# Checkpoints


def save(world: World, folder: str) -> list[float]:
    """Train a step without `accelerate`, save, and return the losses of three more."""
    model, optimizer = prepared(world, accelerated=False)
    some_steps(world, model, optimizer, range(1))
    return saved(world, model, optimizer, folder)


def saved(
    world: World, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str
) -> list[float]:
    states = get_state_dict(model, optimizer)
    checkpoint.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    return some_steps(world, model, optimizer, range(3))


def load(world: World, folder: str) -> list[float]:
    """Load what was saved, without `accelerate`; return the losses of three more steps."""
    return loaded(world, folder, accelerated=False)


def loaded(world: World, folder: str, accelerated: bool) -> list[float]:
    model, optimizer = prepared(world, accelerated)
    states = get_state_dict(model, optimizer)
    found = {"model": states[0], "optimizer": states[1]}
    checkpoint.load(found, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    return some_steps(world, model, optimizer, range(3))


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
    """All ranks have the same batch: their number does not change the losses. Of one length: for
    several, the compiler takes three times as long, and the case "fsdp2" has them."""
    losses = []
    for step in steps:
        world.step(step)
        loss = model(*batch(CASES["weights kept"], step, 0, world.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_a_checkpoint_loads_without_it_on_other_ranks(two: Found) -> None:
    folder, facts = two
    others = launch(load, (str(folder),), ranks=3, limits=LIMITS)
    assert others[0] == pytest.approx(facts[0]["undo"]["saved"], rel=1e-4)


@pytest.mark.thorough
def test_a_checkpoint_loads_with_it_on_other_ranks(tmp_path: Path) -> None:
    continued = launch(save, (str(tmp_path),), ranks=2, limits=LIMITS)[0]
    others = launch(loaded, (str(tmp_path), True), ranks=3, limits=LIMITS)
    assert others[0] == pytest.approx(continued, rel=1e-4)


# The choice, refusals, undo


def chosen(world: World) -> tuple[str, list[float]]:
    choice.SAMPLES = 3
    case = CASES["weights kept"]
    result = trained(world, case, compile={"compiler": "aot_eager"})
    form = re.search(r"form of the step   ([a-z ]*)", result.report)
    assert form is not None
    return form[1], result.losses


def test_ranks_choose_one_form(two: Found) -> None:
    facts = two[1]
    forms = {rank["choice"][0].strip() for rank in facts}
    assert len(forms) == 1
    assert forms <= {*compiled.FORMS}
    for rank, wanted in zip(facts, expected(1, None, False, 2, STEPS), strict=True):
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


def test_what_one_rank_refuses_is_refused_on_all(two: Found) -> None:
    facts = two[1]
    assert "planted" in facts[1]["refusal"]
    assert "differs from the original on another rank" in facts[0]["refusal"]
    for rank in facts:
        assert "SDPA" not in rank["refusal"]
        assert "head and loss         1 × no logits" in rank["refusal"]


def saved_and_undone(world: World, folder: str) -> tuple[Result, dict[str, Any]]:
    """Train, observed, save, train on as all ranks do with one batch, and undo."""
    training = Training(world, CASES[SAVED], compile=FIXED)
    observer = stepscope.Observer(f"{folder}-observed", trace=False)
    training.run(range(FEW_STEPS))
    observer.close()
    result, report = training.result(), training.report
    assert report is not None
    model, optimizer = training.model, training.optimizer
    with torch.no_grad():
        evaluated = float(model(*batch(CASES[SAVED], 0, 0, world.device)))
    continued = saved(world, model, optimizer, folder)
    report.undo()
    return result, {
        "saved": continued,
        "same classes": [type(one) for one in model.modules()]
        == [type(one) for one in sharded_cases.fsdp2(decoder(tied=False), world).modules()],
        "forwards": [name for name, one in model.named_modules() if "forward" in vars(one)],
        "losses": some_steps(world, model, optimizer, range(6, 8)),
        "evaluated": evaluated,
        "again": str(stepscope.accelerate(model, optimizer, compile=FIXED)),
    }


def test_undo_restores_the_model(two: Found) -> None:
    for rank in two[1]:
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


def test_tensor_parallelism_is_named(two: Found) -> None:
    assert "tensor parallelism" in two[1][0]["tensor parallel"]
