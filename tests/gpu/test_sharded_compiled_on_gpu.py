"""`accelerate(compile=True)` with FSDP2 and DDP on a GPU: NCCL with one rank, and gloo between two
ranks that share it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import stepscope
from sharded_cases import CASES, FIXED, Case, Result, alone, batch, loss_of, trained
from small_decoder import adamw, decoder
from stepscope.parallel import Limits, World, launch

LIMITS = Limits(start=60.0, step=60.0, beat=60.0, total=150.0)
GPU = torch.device("cuda")
BY_INDUCTOR = {"form": "compiled with passes"}
GROUPS = [(1, "nccl"), (2, "gloo")]
ON_ONE = (
    "fsdp2", "weights kept", "bfloat16 policy", "accumulation and clipping", "checkpointed",
    "TrainStep", "DDP with views",
)  # fmt: skip
ON_TWO = ("fsdp2", "weights kept", "bfloat16 policy", "DDP")
"""The others have no more to do with streams and kernels: tests/distributed has them."""
TOLERANCE = 2e-3
"""The kernels of attention and of the loss round otherwise than PyTorch's."""

Results = dict[str, Result]


def train_all(world: World, cases: dict[str, Case]) -> Results:
    results = {name: trained(world, case, compile=FIXED) for name, case in cases.items()}
    results["by Inductor"] = trained(world, cases["fsdp2"], compile=BY_INDUCTOR)
    return results


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: group[1])
def ranks(request: pytest.FixtureRequest) -> list[Results]:
    count, backend = request.param
    cases = {name: CASES[name] for name in (ON_ONE if count == 1 else ON_TWO)}
    return launch(train_all, (cases,), ranks=count, backend=backend, device="cuda", limits=LIMITS)


def test_ranks_train_as_one_process_does(ranks: list[Results]) -> None:
    known: dict[Any, list[Result]] = {}
    for name in ranks[0]:
        case = CASES.get(name, CASES["fsdp2"])
        key = case.accumulate, case.max_norm, case.varied
        if key not in known:
            known[key] = alone(case, len(ranks), GPU, compile=FIXED)
        for rank, wanted in zip(ranks, known[key], strict=True):
            tolerance = max(case.tolerance, TOLERANCE)
            assert rank[name].losses == pytest.approx(wanted.losses, rel=tolerance), name
            for parameter, value in wanted.parameters.items():
                found = rank[name].parameters[parameter]
                assert (found - value).norm() <= tolerance * value.norm(), (name, parameter)
                assert torch.equal(found, ranks[0][name].parameters[parameter])


def test_blocks_head_and_loss_have_passes(ranks: list[Results]) -> None:
    for name in ranks[0]:
        report = ranks[0][name].report
        assert "attention" in report, name
        assert "no logits" in report, name
        assert "compile  " not in report, report


def captured(world: World) -> dict[str, Any]:
    """Train in DDP as a CUDA graph, and without one."""
    losses = {}
    for graph in ("on", "off"):
        model = DistributedDataParallel(decoder(tied=False).to(world.device))
        optimizer = adamw(model)
        stepscope.accelerate(model, optimizer, compile={"form": "compiled with passes"})
        step = stepscope.TrainStep(model, optimizer, loss_fn=loss_of, graph=graph)
        losses[graph] = []
        for number in range(20):
            world.step(number)
            losses[graph].append(float(step(batch(CASES["DDP"], number, 0, world.device))))
        losses[f"explain {graph}"] = step.explain()
    return losses


def test_a_step_in_ddp_is_captured_over_nccl() -> None:
    (found,) = launch(captured, ranks=1, backend="nccl", device="cuda", limits=LIMITS)
    assert found["on"] == pytest.approx(found["off"], rel=TOLERANCE)
    assert "0 calls replayed" not in found["explain on"]


def refused(world: World) -> str:
    model = DistributedDataParallel(decoder(tied=False).to(world.device))
    step = stepscope.TrainStep(model, adamw(model), loss_fn=loss_of)
    for number in range(5):
        step(batch(CASES["DDP"], number, world.rank, world.device))
    return step.explain()


@pytest.mark.filterwarnings("ignore::stepscope.acceleration.capture.NotCapturedWarning")
def test_a_step_over_gloo_is_not() -> None:
    found = launch(refused, ranks=2, backend="gloo", device="cuda", limits=LIMITS)
    assert all("gloo, whose collectives wait for the host" in one for one in found)
