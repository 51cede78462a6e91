"""The recipes of examples/ that need other libraries: the Trainer with FSDP2, torchtitan, and a
Kubernetes job."""

from __future__ import annotations

import os
import re
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


def titan_losses(folder: Path, *words: str) -> tuple[list[float], str]:
    """Train a small Llama 3 in torchtitan on two ranks; return the losses and the log."""
    script = Path(__file__).with_name("torchtitan_on_cpu.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    config = ["--module", script.stem, "--config", "small"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(script), *config, *words],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    losses = {
        int(step): float(loss) for step, loss in re.findall(r"step: +(\d+) +loss: +(\S+)", log)
    }
    return [losses[step] for step in sorted(losses)], log


def test_torchtitan_with_overrides_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="the example needs torchtitan")
    expected, _ = titan_losses(tmp_path)
    options = '{"compile": {"compiler": "aot_eager", "form": "compiled with passes"}}'
    found, log = titan_losses(
        tmp_path,
        "--override.imports",
        f"torchtitan_stepscope.accelerated={options}",
        "torchtitan_stepscope.observed",
    )
    assert len(found) == 12
    assert found == pytest.approx(expected, rel=1e-4)
    assert found[-1] < found[0]
    assert re.search(r"units +2 × Llama3TransformerBlock\s+attention +1 × SDPA, causal", log)
    assert "compile  " not in log
    ranks = read_folder(tmp_path / "stepscope-out" / "observer")
    assert [one.start.rank for one in ranks] == [0, 1]
    assert all(one.steps[-1].step == 12 for one in ranks)


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
