"""Behavior that needs a GPU: events, launches, out-of-memory errors, clocks."""

from __future__ import annotations

import pytest
import torch

from stepscope.analysis.limits import host_bound, mfu
from stepscope.analysis.verdict import AtMost
from stepscope.measure.device import CudaDevice, pick_device
from stepscope.measure.timer import Phase, time_step
from stepscope.records.schema import Record
from stepscope.records.store import Store
from stepscope.runner.protocol import Progress
from stepscope.runner.runner import Runner, new_run
from stepscope.studies.base import PlannedCase
from stepscope.studies.registry import find_study


class Silent:
    def calibrating(self, progress: Progress) -> None: ...

    def case_started(self, case: PlannedCase) -> None: ...

    def case_progress(self, progress: Progress) -> None: ...

    def case_finished(self, record: Record) -> None: ...

    def waiting(self, up_to_s: float, used: float, cores: int) -> None: ...

    def measuring_again(self, record: Record) -> None: ...


def run_benchmark(folder, **flags) -> tuple[Record, ...]:
    study = find_study("benchmark")
    cases = study.planned(study.flags(**flags))
    with Store(folder / "records.db") as store, Runner("cuda", 300.0) as runner:
        run = new_run(cases, "")
        store.add_run(run)
        runner.run(cases, run, store, Silent())
        return store.records(run.id)


def test_a_benchmark_has_device_and_host_times_and_a_limit(tmp_path):
    forward, both, step = run_benchmark(tmp_path, size=("small",), context=(128,), dtype=("bf16",))
    assert [r.status for r in (forward, both, step)] == ["ok"] * 3
    for name in ("forward", "loss", "backward", "optimizer", "step"):
        for clock in ("device", "host"):
            assert step.find(name, clock) is not None, (name, clock)
    assert step.find("issue", "host") is not None
    assert step.quantity("gradients_missing") == 0
    # Weights, gradients and both moments of AdamW in float32 are a lower bound of the peak.
    assert step.quantity("peak_bytes") > 16 * step.quantity("parameters")
    achieved = mfu(step)
    # A ceiling that was measured while other work ran has a doubt.
    assert 0.0 < (achieved.value if isinstance(achieved, AtMost) else achieved) < 1.05
    assert host_bound(step) is not None
    assert any(reading.sm_clock_mhz for reading in step.readings)
    assert step.environment.driver is not None


def test_out_of_memory_is_a_record_and_the_sweep_continues(tmp_path):
    records = run_benchmark(
        tmp_path, size=("large",), context=(65_536, 128), batch=(8,), mode=("forward",), steps=5
    )
    assert [record.status for record in records] == ["oom", "ok"]
    assert "memory" in records[0].reason.lower()


def test_events_time_the_device_and_the_host_clock_times_the_issue():
    device = pick_device("cuda")
    assert isinstance(device, CudaDevice)
    cycles = 20_000_000
    timing = time_step(
        [
            Phase("first", lambda: torch.cuda._sleep(cycles)),
            Phase("second", lambda: torch.cuda._sleep(3 * cycles)),
        ],
        device,
        warmup=1,
        steps=5,
    )
    medians = {(s.name, s.clock): sorted(s.values)[2] for s in timing.series}
    assert medians["second", "device"] / medians["first", "device"] == pytest.approx(3, rel=0.1)
    # A sleeping kernel is issued in microseconds and runs for milliseconds.
    assert medians["issue", "host"] < 0.5 * medians["step", "host"]
    assert medians["first", "host"] < 0.5 * medians["first", "device"]
    total = medians["first", "device"] + medians["second", "device"]
    assert total == pytest.approx(medians["step", "device"], rel=0.05)


def test_memory_of_a_graph_for_its_replays_is_counted():
    device = pick_device("cuda")
    device.release()
    before = device.replayed_bytes()
    size = 1 << 26
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(size, device="cuda", dtype=torch.uint8).add_(1)
    assert device.replayed_bytes() - before >= size
    device.reset_peak()
    graph.replay()
    assert device.peak_with_graphs() >= (device.peak_bytes() or 0) + size
    graph.reset()
    del graph
    device.release()
    assert device.replayed_bytes() == before


def test_the_device_frees_the_memory_of_a_case():
    device = pick_device("cuda")
    device.release()
    before = torch.cuda.memory_allocated()
    device.reset_peak()
    block = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
    assert device.peak_bytes() >= before + (1 << 28)
    del block
    device.release()
    assert torch.cuda.memory_allocated() == before
