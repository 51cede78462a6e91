"""A network partition between two nodes: every rank raises in time and names the other node.

The nodes are two network namespaces of this machine, connected by a virtual link that the test
makes, takes down and removes. Nothing leaves the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import TESTS
from partitioned import WRAPPERS

TIMEOUT_S = 30.0
NODES = RANKS_PER_NODE = 2
START_S = 120.0
SLACK_S = 30.0
"""For a busy machine. Unbounded waits for the store and for messages take 5 to 30 minutes."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Names of two namespaces with the addresses 10.203.71.1 and .2; skip if not permitted."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (iproute2)")
    names = [f"stepscope-{os.getpid()}-{node}" for node in range(NODES)]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ends = [f"ss{os.getpid() % 10**6}n{node}" for node in range(NODES)]
            first, second = ((end, "netns", name) for end, name in zip(ends, names, strict=True))
            ip("link", "add", *first, "type", "veth", "peer", *second)
            for node, (name, end) in enumerate(zip(names, ends, strict=True)):
                ip("-n", name, "link", "set", end, "name", "eth0")
                ip("-n", name, "addr", "add", f"10.203.71.{node + 1}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted: {error.stderr.strip()}")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start(name: str, node: int, folder: Path) -> subprocess.Popen[str]:
    """Start the agent of a node."""
    variables = os.environ | {
        "GLOO_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        # A fork of a process outside of the namespace would not be in it.
        "STEPSCOPE_COLD_START": "1",
    }
    words = [
        *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={NODES}", f"--nproc-per-node={RANKS_PER_NODE}", f"--node-rank={node}"),
        *("--master-addr=10.203.71.1", "--master-port=29400"),
        *(str(TESTS / "partitioned.py"), str(folder), str(TIMEOUT_S)),
    ]
    with (folder / f"agent-{node}.log").open("w") as log:
        return subprocess.Popen(
            words, env=variables, text=True, stdout=log, stderr=log, start_new_session=True
        )


def wait_for(folder: Path, what: str, within_s: float) -> None:
    """Wait until every rank has written this file for every wrapper."""
    files = [
        folder / f"{what}-{wrapper}-{rank}"
        for wrapper in WRAPPERS
        for rank in range(NODES * RANKS_PER_NODE)
    ]
    until = time.monotonic() + within_s
    while missing := [file.name for file in files if not file.exists()]:
        early = what == "ready" and any(folder.glob("raised-*"))
        if early or time.monotonic() > until:
            raised = [file.read_text() for file in folder.glob("raised-*")]
            pytest.fail(f"there is no {missing}: {raised}")
        time.sleep(0.05)


@pytest.fixture
def reports(nodes: list[str], tmp_path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """What each rank of each wrapper raised after the link went down."""
    agents = [start(name, node, tmp_path) for node, name in enumerate(nodes)]
    try:
        wait_for(tmp_path, "ready", START_S)
        down = time.monotonic()
        ip("-n", nodes[0], "link", "set", "eth0", "down")
        wait_for(tmp_path, "raised", TIMEOUT_S + SLACK_S)
    finally:
        for agent in agents:
            os.killpg(agent.pid, 9)
            agent.wait()
        for name in nodes:
            # Ranks are in sessions of their own; only those of this test are in its namespaces.
            pids = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            ).stdout.split()
            for pid in pids:
                subprocess.run(["kill", "-9", pid], check=False)
    found = {}
    for wrapper in WRAPPERS:
        for rank in range(NODES * RANKS_PER_NODE):
            report = json.loads((tmp_path / f"raised-{wrapper}-{rank}").read_text())
            found[wrapper, rank] = report | {"after_s": report["at_s"] - down}
    return found


@pytest.mark.thorough
def test_every_rank_names_the_other_node(
    reports: dict[tuple[str, int], dict[str, Any]],
) -> None:
    for (wrapper, rank), report in reports.items():
        own = rank // RANKS_PER_NODE
        others = [2, 3] if own == 0 else [0, 1]
        text = f"{wrapper} rank {rank}: {report}"
        assert report["type"] == "PeerLost", text
        assert report["ranks"] == others, text
        assert [name.split(" (")[0] for name in report["nodes"]] == [f"node {1 - own}"], text
        assert f"rank {rank} lost contact with node {1 - own}" in report["text"], text
