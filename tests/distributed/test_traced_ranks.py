"""`stepscope trace FOLDER` on the traces of real ranks, one of which is late."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from ranked import LIMITS
from stepscope.cli import main
from stepscope.parallel import World, launch

RANKS, STEPS, LATE_RANK, LATE_AT = 3, 4, 1, 2
LAYERS = 3
SLEEP_S = 0.2
"""Far longer than what the scheduler of a busy machine takes from a rank on average."""


def train_traced(world: World, folder: str) -> None:
    """Train with one all-reduce per layer; one rank sleeps before the second of them."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    path = Path(folder) / f"worker-{world.rank}.json.gz"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=plan,
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        for number in range(1 + STEPS):
            world.step(number)
            model(torch.randn(8, 32)).pow(2).mean().backward()
            for index, parameter in enumerate(model.parameters(), 1):
                if (world.rank, index) == (LATE_RANK, LATE_AT):
                    time.sleep(SLEEP_S)
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()


def test_a_rank_that_sleeps_is_named_with_its_collective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    launch(train_traced, (str(folder),), ranks=RANKS, limits=LIMITS)
    assert main(["trace", str(folder), "--out", str(tmp_path), "--json"]) == 0
    job = json.loads(capsys.readouterr().out)["job"]
    assert [row["rank"] for row in job["ranks"]] == list(range(RANKS))
    assert not job["unread"]
    assert job["compared"] == LAYERS * STEPS
    for row in job["ranks"]:
        parts = row["compute_ms"] + row["exposed_ms"] + row["idle_ms"]
        assert parts == pytest.approx(row["step_ms"])
        assert row["steps"] == STEPS
    straggler = job["stragglers"][0]
    assert straggler["rank"] == LATE_RANK
    collective = straggler["collective"]
    assert (collective["collective"], collective["number"], collective["of"]) == (
        "all_reduce",
        LATE_AT,
        LAYERS,
    )
    # It sleeps: its device does not work longer.
    assert straggler["work_ms"] < straggler["late_ms"] / 2
    waits = {row["rank"]: row["waiting_ms"] for row in job["ranks"]}
    assert min(waits, key=lambda rank: waits[rank]) == LATE_RANK
