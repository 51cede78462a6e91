"""Scripts and studies under torchrun, with one agent, and with two as on two nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from command_line import TESTS, CommandLine
from stepscope.records.schema import Record
from stepscope.records.store import Store

SCRIPT = """
import torch, torch.distributed as dist
from stepscope.parallel import DDP, World

world = World.from_environment(device="cpu")
with world.connected(timeout_s=30):
    model = DDP(torch.nn.Linear(2, 1, bias=False), "bucketed")
    world.step(0)
    model(torch.full((1, 2), float(world.rank))).sum().backward()
    model.finish_gradient_synchronization()
    gradient = model.module.weight.grad.tolist()
    with open(f"{dist.get_rank()}.txt", "w") as file:
        file.write(f"{world.rank} of {world.size}, local {world.local_rank}: {gradient}")
"""


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def torchrun(folder: Path, nodes: int, *words: str) -> list[tuple[int, str]]:
    """Run two ranks on that many agents, each in its own folder; return exit codes and output."""
    port = free_port()
    cli = CommandLine(folder)
    cli.know_ceilings()
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        # As in this process, so that the cached ceilings apply.
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "PYTHONPATH": path,
        "STEPSCOPE_STUDIES": "planted_ranks_study",
        "XDG_CACHE_HOME": cli.environment["XDG_CACHE_HOME"],
    }
    agents = []
    for node in range(nodes):
        own = folder / f"node{node}"
        own.mkdir(exist_ok=True)
        agents.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    f"--nnodes={nodes}",
                    f"--nproc-per-node={2 // nodes}",
                    f"--node-rank={node}",
                    "--master-addr=127.0.0.1",
                    f"--master-port={port}",
                    *words,
                ],
                cwd=own,
                env=variables,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        outputs = [agent.communicate(timeout=400)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [(agent.returncode, text) for agent, text in zip(agents, outputs, strict=True)]


def records_of(folder: Path) -> tuple[Record, ...]:
    with Store(folder / "stepscope-out" / "records.db", create=False) as store:
        return store.records()


def test_a_script_runs_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for code, text in torchrun(tmp_path, 2, "../train.py"):
        assert code == 0, text
    for rank in range(2):
        text = (tmp_path / f"node{rank}" / f"{rank}.txt").read_text()
        assert text == f"{rank} of 2, local 0: [[0.5, 0.5]]"


QUICK = ("--model", "own_models:causal_lm", "--rounds", "2")


@pytest.mark.parametrize(
    ("nodes", "words", "variant"),
    [
        (2, ("ddp", *QUICK, "--bucket-mb", "1"), "bucketed 1 MiB"),
        pytest.param(1, ("fsdp", *QUICK), "FSDP", marks=pytest.mark.thorough),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_study_runs_under_torchrun(
    tmp_path: Path, nodes: int, words: tuple[str, ...], variant: str
) -> None:
    for code, text in torchrun(tmp_path, nodes, "-m", "stepscope", "run", *words):
        assert code == 0, text
    (record,) = records_of(tmp_path / "node0")
    assert record.status == "ok"
    steps = {s.rank for s in record.series if (s.name, s.variant) == ("step", variant)}
    assert steps == {0, 1}
    assert (tmp_path / "node0" / "stepscope-out" / "report.html").exists()
    if nodes == 2:
        # Only rank 0 stores anything.
        assert not list((tmp_path / "node1").iterdir())


def test_a_failed_rank_is_reported_and_the_next_case_is_measured(tmp_path: Path) -> None:
    cases = ("planted-ranks", "--fails", "1", "0", "-1", "--ranks", "2", "3")
    for code, text in torchrun(tmp_path, 2, "-m", "stepscope", "run", *cases):
        # Some record has an error, which the exit code of `run` reports.
        assert code in (0, 1), text
    records = {record.case: record for record in records_of(tmp_path / "node0")}
    assert records["r2-fails1"].reason == "RankFailed: rank 1 raised ValueError: planted at step 1"
    assert records["r2-fails0"].reason == "RankFailed: rank 0 raised ValueError: planted at step 1"
    assert [series.values for series in records["r2-fails-1"].series] == [(4.0,), (4.0,)]
    assert records["r3-fails-1"].status == "skipped"
    assert records["r3-fails-1"].reason == "torchrun started 2 ranks, this case needs 3"
