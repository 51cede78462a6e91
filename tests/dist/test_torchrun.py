"""The same script under torchrun: one agent, and two agents as two nodes would be."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch, torch.distributed as dist
from stepscope.parallel import DDP, World

world = World.from_environment(device="cpu")
with world.connected(timeout_s=30):
    model = DDP(torch.nn.Linear(2, 1, bias=False), "bucketed")
    world.step(0)
    model(torch.full((1, 2), float(world.rank))).sum().backward()
    model.finish_gradient_synchronization()
    held = model.module.weight.grad.tolist()
    with open(f"{dist.get_rank()}.txt", "w") as file:
        file.write(f"{world.rank} of {world.size}, local {world.local_rank}: {held}")
"""


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_script_runs_under_torchrun(tmp_path: Path, nodes: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    port = free_port()
    per_node = 2 // nodes
    agents = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}",
                f"--nproc-per-node={per_node}", f"--node-rank={node}",
                "--master-addr=127.0.0.1", f"--master-port={port}", "train.py",
            ],
            cwd=tmp_path,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(nodes)
    ]  # fmt: skip
    try:
        for agent in agents:
            _, errors = agent.communicate(timeout=90)
            assert agent.returncode == 0, errors[-2000:]
    finally:
        for agent in agents:
            agent.kill()
    for rank in range(2):
        local = rank % per_node
        said = (tmp_path / f"{rank}.txt").read_text()
        assert said == f"{rank} of 2, local {local}: [[0.5, 0.5]]"
