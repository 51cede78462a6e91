"""The recipes of examples/ that need other libraries: the Trainer with FSDP2, and a Kubernetes
job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.analysis.observed.lines import read_folder

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_trainer_with_fsdp2_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the example needs transformers")
    pytest.importorskip("accelerate", reason="the Trainer needs Accelerate for FSDP2")
    words = ["--standalone", "--nproc-per-node", "2", str(EXAMPLES / "hf_fsdp2.py")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "--device", "cpu", "--steps", "40"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "mean loss" in done.stdout
    ranks = read_folder(tmp_path / "stepscope-out" / "observer")
    assert [one.start.rank for one in ranks] == [0, 1]
    for one in ranks:
        assert one.steps[-1].step == 40
        assert any(wait.collective == "all_gather" for wait in one.steps[-1].waits)


def test_the_kubernetes_job_starts_the_ranks_of_two_pods() -> None:
    yaml = pytest.importorskip("yaml")
    text = (EXAMPLES / "cluster" / "kubernetes.yaml").read_text()
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    pod = spec["template"]["spec"]
    # The name of the first pod in the Service is the address of the rendezvous.
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (container,) = pod["containers"]
    words = container["command"]
    assert f"--nnodes={spec['completions']}" in words
    assert f"--master-addr={job['metadata']['name']}-0.{service['metadata']['name']}" in words
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    (folder,) = (word.partition("=")[2] for word in words if word.startswith("--folder="))
    assert any(folder.startswith(mount["mountPath"]) for mount in container["volumeMounts"])
