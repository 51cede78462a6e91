"""The recipes for several ranks in examples/ run: with two gloo ranks, or with a stand-in of the
scheduler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import TESTS
from stepscope.analysis.observed.lines import read_folder

EXAMPLES = TESTS.parent / "examples"


@pytest.mark.parametrize("options", [(), ("--accelerate",)], ids=["plain", "accelerated"])
def test_fsdp2_in_an_own_loop(options: tuple[str, ...], tmp_path: Path) -> None:
    if options and not os.environ.get("STEPSCOPE_TEST_ALL"):
        pytest.skip("STEPSCOPE_TEST_ALL=1 compiles, too")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["--device", "cpu", "--steps", "25", "--folder", str(tmp_path / "seen"), *options]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, str(EXAMPLES / "fsdp2.py"), *words],
        cwd=tmp_path,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    first, last = (float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout))
    assert last < first
    assert ("units                 2 × TransformerEncoderLayer" in done.stdout) == bool(options)
    assert "differ" not in done.stdout
    ranks = read_folder(tmp_path / "seen")
    assert [one.start.rank for one in ranks] == [0, 1]
    for one in ranks:
        assert [line.step for line in one.steps] == [10, 20, 25]
        waits = {wait.collective for wait in one.steps[-1].waits}
        assert "all_gather" in waits
        assert one.steps[-1].communication_ms > 0.0


def test_the_slurm_job_starts_a_torchrun_on_each_node(tmp_path: Path) -> None:
    for name, text in (
        ("scontrol", 'test "$*" = "show hostnames node-[a-b]" && printf "node-a\\nnode-b\\n"'),
        ("srun", 'printf "%s\\n" "$@"'),
    ):
        stand_in = tmp_path / name
        stand_in.write_text(f"#!/bin/bash\n{text}\n")
        stand_in.chmod(0o755)
    done = subprocess.run(
        ["bash", str(EXAMPLES / "cluster" / "slurm.sh"), "examples/fsdp2.py", "--size", "real"],
        env=os.environ
        | {
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "SHARED": "/shared",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": "node-[a-b]",
            "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "8",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[0] == "torchrun"
    flags = dict(zip(words[1:11:2], words[2:11:2], strict=True))
    assert flags == {
        "--nnodes": "2",
        "--nproc-per-node": "8",
        "--rdzv-id": "17",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "node-a:29500",
    }
    assert words[11:] == [
        *("examples/fsdp2.py", "--size", "real", "--folder", "/shared/observer-17")
    ]
