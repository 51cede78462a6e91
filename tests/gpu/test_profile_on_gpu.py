"""Traces of real steps on a GPU: the ledger adds up, and nearly all kernel time is attributed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from command_line import CommandLine
from quiet_bench import QuietBench
from stepscope.analysis.trace.summary import Summary
from stepscope.errors import first_cause
from stepscope.measure.device import pick_device
from stepscope.records.schema import Series
from stepscope.studies.base import CaseSkipped, Measurement
from stepscope.studies.profile.experiments import graph_replay
from stepscope.studies.registry import find_study
from stepscope.training.captured import CapturedStep
from stepscope.training.flags import WorkloadFlags
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import workloads

pytestmark = pytest.mark.timeout(600)


def measured(folder: Path, monkeypatch: pytest.MonkeyPatch, **flags: object) -> Measurement:
    monkeypatch.setenv("STEPSCOPE_TRACES", str(folder))
    study = find_study("profile")
    (case,) = study.cases(study.flags(**flags))
    return study.measure(case, QuietBench(pick_device("cuda")))


def median(measurement: Measurement, name: str, clock: str = "device") -> float:
    series: Series = next(s for s in measurement.series if s.name == name and s.clock == clock)
    return sorted(series.values)[len(series.values) // 2]


@pytest.mark.parametrize("compiled", ["no", "block"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["forward", "train-step"])
def test_the_ledger_adds_up_and_kernels_are_attributed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, dtype: str, compiled: str
) -> None:
    measurement = measured(
        tmp_path, monkeypatch, size=("small",), context=(512,), dtype=(dtype,), mode=(mode,),
        compile=(compiled,),
    )  # fmt: skip
    summary: Summary = measurement.attachments["profile"]
    assert summary.on_device
    assert summary.doubt == ""
    assert sum(line.ms for line in summary.lines) == pytest.approx(summary.wall_ms)
    assert summary.shares.kind >= 0.98
    assert summary.shares.launch >= 0.99
    if mode == "train-step":
        assert summary.shares.backward_module >= 0.95
    if "PYTEST_XDIST_WORKER" not in os.environ:
        # The profiler does not slow kernels down: busy time cannot exceed the timed step, unless
        # another process uses the device at the same time.
        assert summary.busy_ms <= median(measurement, "step", "host") * 1.1


def test_a_small_step_is_host_bound_and_a_cuda_graph_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement = measured(
        tmp_path, monkeypatch, size=("small",), context=(128,), mode=("forward-backward",)
    )
    summary = measurement.attachments["profile"]
    assert "graph_replay" not in measurement.notes, measurement.notes["graph_replay"]
    assert "larger_batch" not in measurement.notes, measurement.notes["larger_batch"]
    assert summary.idle_of("CPU") / summary.wall_ms > 0.25
    assert median(measurement, "graph_replay") < 0.8 * median(measurement, "step")
    assert median(measurement, "larger_batch") < 2.0 * median(measurement, "step")


def test_the_ledger_of_a_replayed_step_has_no_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement = measured(
        tmp_path, monkeypatch, size=("small",), context=(128,), mode=("train-step",), graph=True
    )
    summary = measurement.attachments["profile"]
    assert summary.doubt == ""
    assert {line.phase for line in summary.lines if line.ms and line.phase} <= {"graph", "idle"}
    assert summary.shares.kind >= 0.98


def test_a_forked_worker_sees_the_device_and_its_kernels(tmp_path: Path) -> None:
    """The first case runs in a fresh process, the others are forked from one with torch loaded."""
    command_line = CommandLine(tmp_path)
    # Ceilings that another test has measured need not be measured again.
    command_line.environment["XDG_CACHE_HOME"] = os.environ["XDG_CACHE_HOME"]
    done = command_line(
        "run", "profile", "--size", "small", "--layers", "2", "--context", "128", "--mode",
        "forward", "forward-backward", "train-step", "--traced", "1", "--steps", "3",
        "--no-experiments", "--no-report", timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = command_line.records()
    assert [record.status for record in records] == ["ok"] * 3
    for record in records:
        summary = record.required("profile", Summary)
        assert summary.on_device
        assert summary.shares.launch >= 0.99
    assert len(list((command_line.out / "traces").glob("*.json.gz"))) == 3


def test_a_failed_capture_does_not_affect_later_work() -> None:
    device = pick_device("cuda")
    (workload,) = workloads(WorkloadFlags(size=("tiny",), context=(64,)), ("forward-backward",))
    step = TransformerStep(workload, device)
    plain_forward = step._forward

    def forward_that_waits() -> None:
        plain_forward()
        torch.ones(1, device="cuda").item()

    step._forward = forward_that_waits  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        graph_replay(step, device)
    assert "captur" in first_cause(caught.value)
    torch.rand(1, device="cuda")
    with pytest.raises(CaseSkipped, match=r"cannot be a CUDA graph: .*captur"):
        CapturedStep(step, workload)
    # A step whose graph is still alive must not prevent the next capture.
    step = TransformerStep(workload, device)
    step.run_phases()
    tried = graph_replay(step, device)
    assert len(tried.timing.series[0].values) == 7
