"""Traces of real steps on a GPU: the ledger closes, and nearly all kernel time is attributed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from command_line import CommandLine
from stepscope.analysis.trace.summary import Summary
from stepscope.errors import first_cause
from stepscope.records.schema import Series
from stepscope.studies.base import CaseSkipped, Measurement
from stepscope.studies.profile.experiments import graph_replay
from stepscope.studies.registry import find_study
from stepscope.studies.training.captured import CapturedStep
from stepscope.studies.training.transformer import TransformerStep
from stepscope.studies.training.workload import WorkloadFlags, workloads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(600),
]


class Bench:
    def __init__(self) -> None:
        from stepscope.measure.device import pick_device

        self.device = pick_device("cuda")

    def progress(self, done: int, total: int, what: str) -> None:
        del done, total, what


def measured(folder: Path, monkeypatch: pytest.MonkeyPatch, **flags: object) -> Measurement:
    monkeypatch.setenv("STEPSCOPE_TRACES", str(folder))
    study = find_study("profile")
    (case,) = study.cases(study.flags(**flags))
    return study.measure(case, Bench())


def median(measurement: Measurement, name: str, clock: str = "device") -> float:
    held: Series = next(
        s for s in measurement.series if s.name == name and s.clock == clock
    )  # fmt: skip
    return sorted(held.values)[len(held.values) // 2]


@pytest.mark.parametrize("compiled", ["no", "block"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["forward", "train-step"])
def test_the_ledger_closes_and_kernels_are_attributed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, dtype: str, compiled: str
) -> None:
    found = measured(
        tmp_path, monkeypatch, size=("small",), context=(512,), dtype=(dtype,), mode=(mode,),
        compile=(compiled,),
    )  # fmt: skip
    summary: Summary = found.attachments["profile"]
    assert summary.on_device
    assert summary.doubt == ""
    assert sum(line.ms for line in summary.lines) == pytest.approx(summary.wall_ms)
    assert summary.shares.kind >= 0.98
    assert summary.shares.launch >= 0.99
    if mode == "train-step":
        assert summary.shares.backward_module >= 0.95
    if "PYTEST_XDIST_WORKER" not in os.environ:
        # Kernels take as long with the profiler as without it: busy time cannot exceed the timer's,
        # where no other process has the device meanwhile.
        assert summary.busy_ms <= median(found, "step", "host") * 1.1


def test_the_host_limits_a_small_step_and_a_graph_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(
        tmp_path, monkeypatch, size=("small",), context=(128,), mode=("forward-backward",)
    )
    summary = found.attachments["profile"]
    assert "graph_replay" not in found.notes, found.notes["graph_replay"]
    assert "larger_batch" not in found.notes, found.notes["larger_batch"]
    assert summary.idle_of("host") / summary.wall_ms > 0.25
    assert median(found, "graph_replay") < 0.8 * median(found, "step")
    assert median(found, "larger_batch") < 2.0 * median(found, "step")


def test_a_replayed_step_is_accounted_for_without_a_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(
        tmp_path, monkeypatch, size=("small",), context=(128,), mode=("train-step",), graph=True
    )
    summary = found.attachments["profile"]
    assert summary.doubt == ""
    assert {line.phase for line in summary.lines if line.ms and line.phase} <= {"graph", "idle"}
    assert summary.shares.kind >= 0.98


def test_a_forked_worker_sees_the_device_and_its_kernels(tmp_path: Path) -> None:
    """The first case has a process of its own, the others are forked from one that has torch."""
    place = CommandLine(tmp_path)
    # Ceilings that another test has measured need not be measured again.
    place.environment["XDG_CACHE_HOME"] = os.environ["XDG_CACHE_HOME"]
    done = place(
        "run", "profile", "--size", "small", "--layers", "2", "--context", "128", "--mode",
        "forward", "forward-backward", "train-step", "--traced", "1", "--steps", "3",
        "--no-experiments", "--no-report", timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = place.records()
    assert [record.status for record in records] == ["ok"] * 3
    for record in records:
        summary = record.required("profile", Summary)
        assert summary.on_device
        assert summary.shares.launch >= 0.99
    assert len(list((place.out / "traces").glob("*.json.gz"))) == 3


def test_a_capture_that_fails_takes_nothing_from_what_follows() -> None:
    device = Bench().device
    (workload,) = workloads(
        WorkloadFlags(size=("tiny",), context=(64,)), ("forward-backward",)
    )  # fmt: skip
    step = TransformerStep(workload, device)
    whole = step._forward

    def forward_that_waits() -> None:
        whole()
        torch.ones(1, device="cuda").item()

    step._forward = forward_that_waits  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        graph_replay(step, device)
    assert "captur" in first_cause(caught.value)
    torch.rand(1, device="cuda")
    with pytest.raises(CaseSkipped, match=r"cannot be a CUDA graph: .*captur"):
        CapturedStep(step, device)
    # A step whose graph is still held must not get into the way of the next capture.
    step = TransformerStep(workload, device)
    step.run_phases()
    tried = graph_replay(step, device)
    assert len(tried.timing.series[0].values) == 7
