"""A user's step on a GPU: inspected, advised, verified."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import stepscope
from quiet_bench import QuietBench
from stepscope.advisor.advise.facts import facts_of
from stepscope.analysis.advice.changes import advise
from stepscope.records.jsonl import read_records
from stepscope.records.memory import PARAMETERS
from stepscope.views.program.rows import ProgramRecord

pytestmark = pytest.mark.timeout(400)
EXAMPLES = Path(__file__).parents[2] / "examples"


def inspected(tmp_path: Path, script: str, *words: str) -> ProgramRecord:
    command = [
        sys.executable, "-m", "stepscope", "inspect", "--stop-early", "--out", str(tmp_path),
        str(EXAMPLES / script), "--device", "cuda", "--steps", "60", *words,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (record,) = read_records(tmp_path / f"{Path(script).stem}.jsonl")
    return ProgramRecord(record)


SMALL = ("--layers", "4", "--width", "512", "--heads", "8")


def test_the_slow_example_is_analyzed(tmp_path: Path) -> None:
    watched = inspected(tmp_path, "slow.py", *SMALL, "--context", "256", "--batch", "8")
    summary, ledger = watched.summary, watched.account
    assert summary is not None
    assert summary.on_device
    assert summary.doubt == ""
    assert watched.record.find("step", "device") is not None
    assert {"forward", "backward", "optimizer"} <= {line.phase for line in summary.lines}
    assert any(use.module == "blocks.*/attention" for use in summary.uses)
    assert summary.idle_of("synchronization") > 0
    assert ledger is not None
    # The cuBLAS workspace is not in the ledger: measuring it would disturb the program.
    assert abs(ledger.highest.unattributed) < 128 << 20
    assert ledger.line(PARAMETERS) == 4 * watched.record.quantity("parameters")  # type: ignore[operator]
    assert "snapshot" in watched.record.notes
    facts = facts_of(watched.record)
    matmul_ms = sum(work.classes["matmul"] for work in facts.attention)
    assert sum(work.device_ms for work in facts.attention) > matmul_ms > 0
    assert (facts.waits, facts.reads_back) == ("end", True)
    issue_ms = watched.issue_ms
    assert set(issue_ms) == {"outside", "forward", "backward", "optimizer"}
    assert all(ms > 0 for ms in issue_ms.values())
    assert facts.host_ms == pytest.approx(sum(issue_ms.values()))
    assert 1e-3 < facts.launch_ms < 0.5
    assert facts.pageable_ms > 0
    assert facts.cleared_ms > 0
    runs = [work.runs for work in facts.phases if work.name in ("forward", "backward")]
    assert all(one is not None and 0 < one.longest < 1 and one.runs < one.kernels for one in runs)


def test_a_scope_records_a_loop_on_a_gpu(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scope = stepscope.Scope(model, optimizer)
    x = torch.randn(4096, 1024, device="cuda")
    for _ in range(30):
        with scope.step():
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    scope.report(tmp_path / "page.html")
    watched = ProgramRecord(scope.record())
    assert not [note for note in watched.record.notes if note.endswith(("missing", "failed"))]
    assert watched.summary is not None
    assert watched.step_ms > 0
    assert watched.summary.on_device
    # The GEMMs alone, at a rate that no GPU exceeds in float32.
    flops = 6 * 8 * 4096 * 1024**2
    assert watched.summary.wall_ms >= watched.summary.busy_ms > 1e3 * flops / 1e15


def test_accumulation_and_autocast_of_the_gpt_example(tmp_path: Path) -> None:
    watched = inspected(tmp_path, "nano_gpt.py", *SMALL, "--accumulate", "3")
    assert watched.micro_batches == 3
    assert watched.record.config["dtype"] == "bfloat16"
    assert watched.setting is not None
    assert watched.setting.optimizers[0].fused


def test_a_compiled_example_is_not_compiled_again(tmp_path: Path) -> None:
    watched = inspected(tmp_path, "nano_gpt.py", *SMALL, "--compile")
    assert watched.setting is not None
    assert watched.setting.compiled
    assert "compiled" in watched.record.notes["memory_missing"]
    assert watched.summary is not None
    # Its weights are float32 and no operator is recorded: the kernels show the compute dtype.
    assert facts_of(watched.record).dtype == "bfloat16"


def test_advice_for_a_slow_step_is_verified(tmp_path: Path) -> None:
    """Two models in one process: a compiled one and an eager copy."""
    command = [
        sys.executable, "-m", "stepscope", "advise", "--model", "examples.slow:build",
        "--batch", "64", "--optimizer", "adamw-loop", "--verify", "--json", "--rounds", "7",
        "--total-timeout", "200", "--timeout", "120", "--out", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    result = msgspec.json.decode(done.stdout)
    assert {one["code"] for one in result["advice"]} >= {"fused-optimizer", "compile"}
    assert any(one["verdict"] == "kept" for one in result["tried"])
    assert not [one for one in result["tried"] if one["verdict"].startswith("not tried")]


def test_a_change_of_dtype_needs_measured_rates(tmp_path: Path) -> None:
    watched = inspected(tmp_path, "slow.py", *SMALL)
    bare = msgspec.structs.replace(facts_of(watched.record), rates={})
    assert not {"tf32", "bfloat16"} & {one.code for one in advise(bare)}


def test_energy_is_about_power_times_time() -> None:
    from step_race.energy import Energy, measure_energy

    from stepscope.measure.device import CudaDevice

    device = CudaDevice()
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    energy = measure_energy(lambda: x @ x, device)
    assert isinstance(energy, Energy), energy
    limit = device.telemetry.power_limit_w()
    assert limit is not None
    assert 50 < energy.watts < 1.1 * limit
    assert energy.joules == pytest.approx(energy.watts * energy.step_ms * 1e-3)
    assert energy.sm_clock_mhz is not None
    assert energy.sm_clock_mhz <= (device.telemetry.max_sm_clock_mhz() or 0)
    assert energy.resolution < 0.2 * energy.joules


def test_a_slow_script_is_made_faster_from_outside_the_script(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "stepscope", "advise", "--verify", "--json", "--rounds", "7",
        "--timeout", "90", "--total-timeout", "80", "--out", str(tmp_path),
        str(EXAMPLES / "slow.py"), "--device", "cuda", "--steps", "100000", *SMALL,
        "--context", "512", "--batch", "32",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr
    result = msgspec.json.decode(done.stdout)
    assert {one["code"] for one in result["advice"]} >= {"bfloat16", "tf32", "compile"}
    verdicts = {one["change"]: one["verdict"] for one in result["tried"]}
    assert any(verdict.startswith("kept") for verdict in verdicts.values()), verdicts
    assert not [one for one in verdicts.values() if "no effect on the script" in one], verdicts
    assert not [one for one in verdicts.values() if one.startswith("not tried")], verdicts


@pytest.mark.parametrize("change", ["read_back", "copies"])
def test_a_change_of_the_loop_applies(change: str) -> None:
    from stepscope.advisor.advise.interleaved import TrialProcess
    from stepscope.advisor.inspect.order import Order

    order = Order(
        target=str(EXAMPLES / "slow.py"), words=("--device", "cuda", "--steps", "1000"), warmup=5,
        timed=1, traced=1, memory=False,
    )  # fmt: skip
    with TrialProcess(order, {}) as plain, TrialProcess(order, {change: "yes"}) as changed:
        assert not plain.ready().missing
        assert not changed.ready().missing
        plain.turn(5)
        changed.turn(5)
        assert plain.losses == pytest.approx(changed.losses, rel=1e-4)


def test_the_peak_of_a_user_s_model_is_that_of_one_model() -> None:
    """Its FLOPs are counted on the same model, after the peak is read."""
    from stepscope.measure.device import pick_device
    from stepscope.studies.registry import find_study
    from stepscope.training.factory import make_step
    from stepscope.training.workload import Workload

    study = find_study("benchmark")
    flags = study.flags(
        model="examples.slow:build", batch=(8,), mode=("train-step",), warmup=1, steps=2,
        min_seconds=0.0,
    )  # fmt: skip
    (case,) = study.cases(flags)
    device = pick_device("cuda")
    device.release()
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(EXAMPLES.parent))
        measured = study.measure(study.decode(case.config), QuietBench(device))
        device.release()
        device.reset_peak()
        step = make_step(msgspec.convert(case.config, Workload), device)
        for _ in range(3):
            step.run()
        alone = device.peak_bytes()
    assert alone is not None
    values = {one.name: one.value for one in measured.quantities}
    assert values["peak_bytes"] == pytest.approx(alone, rel=0.02)
    assert values["flops"] > 0
