"""Post-mortem of a step that ran out of memory: the allocator's message, the ledger, remedies."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quiet_bench import QuietBench
from stepscope.analysis.predict.allocator import CachingAllocator, OutOfBlocks
from stepscope.analysis.predict.step import overrun, predict, runs_within
from stepscope.measure.device import CpuDevice
from stepscope.runner.protocol import Failed, MeasureCase
from stepscope.runner.worker import Worker
from stepscope.studies.benchmark.cases import BenchmarkCase
from stepscope.studies.registry import find_study
from stepscope.training.flags import WorkloadFlags
from stepscope.training.plans import plan_of
from stepscope.training.post_mortem import (
    NOTE,
    Refusal,
    examined,
    read_refusal,
    step_post_mortem,
)
from stepscope.training.workload import Workload, case_of, workloads

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import planted_ooms

GIB, MIB = 1 << 30, 1 << 20
FULL = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 139.81 GiB of"
    " which 512.00 MiB is free. 12.00 GiB allowed; Including non-PyTorch memory, this process has"
    " 11.90 GiB memory in use. Of the allocated memory 10.25 GiB is allocated by PyTorch, and"
    " 300.00 MiB is reserved by PyTorch but unallocated."
)


def small_step(**fields: Any) -> Workload:
    flags = WorkloadFlags(size=("small",), context=(1024,), **fields)
    (only,) = workloads(flags, ("train-step",))
    return only


def test_the_message_of_the_allocator_is_parsed() -> None:
    assert read_refusal(FULL) == (1536 * MIB, int(10.25 * GIB), 12 * GIB)
    on_cpu = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
    assert read_refusal(on_cpu) == (4096, 0, 0)
    assert read_refusal("out of memory") == (0, 0, 0)


def test_the_moment_it_ran_out_is_itemised() -> None:
    plan = plan_of(small_step(), "cuda")
    peak = predict(plan).peak.allocated
    moment = overrun(plan, peak // 2)
    assert moment is not None
    assert peak // 2 < moment.allocated < peak
    assert sum(moment.lines.values()) == moment.allocated
    assert overrun(plan, peak) is None


def test_remedies_name_what_to_change_and_fit() -> None:
    work = small_step()
    limit = 13 * GIB // 2
    post_mortem = examined(work, "cuda", limit, Refusal(MIB, 5 * GIB, 0))
    assert post_mortem.missing == post_mortem.needed - limit > 0
    assert [remedy.words for remedy in post_mortem.remedies[:1]] == ["flash attention"]
    assert len({frozenset(remedy.changes) for remedy in post_mortem.remedies}) == len(
        post_mortem.remedies
    )
    for remedy in post_mortem.remedies:
        changed = planted_ooms.changed(work, remedy)
        assert predict(plan_of(changed, "cuda")).peak.allocated == remedy.peak < limit


def test_under_a_limit_free_segments_are_released_first() -> None:
    allocator = CachingAllocator(limit=64 * MIB)
    first = allocator.allocate(30 * MIB)
    allocator.release(first)
    # It does not fit next to the free segment, so that one is released.
    allocator.allocate(50 * MIB)
    assert allocator.reserved == 50 * MIB
    with pytest.raises(OutOfBlocks):
        allocator.allocate(20 * MIB)


def test_a_step_runs_with_a_little_more_than_its_peak_and_not_with_less() -> None:
    plan = plan_of(small_step(dtype=("bfloat16",)), "cuda")
    prediction = predict(plan)
    assert runs_within(plan, max(moment.reserved for moment in prediction.phases))
    assert not runs_within(plan, prediction.peak.allocated - MIB)


def test_a_worker_attaches_a_post_mortem(monkeypatch: pytest.MonkeyPatch) -> None:
    study = find_study("benchmark")

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(type(study), "measure", fails)
    monkeypatch.setattr(CpuDevice, "memory_bytes", 6 * GIB)
    worker = Worker(io.BytesIO(), "cpu")
    config = case_of(small_step(), BenchmarkCase, warmup=0, steps=1, min_seconds=0.0).config
    reply = worker.answer(MeasureCase("benchmark", config))
    assert isinstance(reply, Failed)
    assert reply.status == "oom"
    noted = reply.attachments[NOTE]
    assert (noted.limit, noted.asked) == (6 * GIB, 1536 * MIB)
    # An error of the post-mortem does not hide the failure.
    monkeypatch.setattr(type(study), "post_mortem", fails)
    assert worker.answer(MeasureCase("benchmark", config)) == Failed("oom", reply.reason)


def test_a_case_and_its_config_have_the_same_post_mortem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "memory_bytes", 6 * GIB)
    study = find_study("checkpointing")
    flags = study.flags(size=("small",), context=(1024,), checkpoint=("no",))
    (case,) = study.cases(flags)
    bench = QuietBench()
    noted = study.post_mortem(case, bench, FULL)
    assert noted[NOTE].remedies
    assert noted == step_post_mortem(case.config, bench, FULL)


@pytest.mark.parametrize("number", [1, 4])
def test_the_first_remedy_of_a_planted_case_fits_when_run(number: int) -> None:
    """All ten: benchmarks/planted_ooms.py."""
    planted = planted_ooms.PLANTED[number]
    work = planted_ooms.workload(planted, small=True)
    limit = int(planted[-1] * predict(plan_of(work, "cpu")).peak.allocated)
    refusal = planted_ooms.refused(work, CpuDevice(), limit)
    assert refusal is not None
    first = examined(work, "cpu", limit, refusal).remedies[0]
    assert planted_ooms.refused(planted_ooms.changed(work, first), CpuDevice(), limit) is None
