"""The published memory records: ledgers that add up, and predictions confirmed on the device."""

from __future__ import annotations

import statistics
from itertools import product
from pathlib import Path

import pytest

from stepscope.records.jsonl import read_records
from stepscope.studies.checkpointing.view import StrategyRun
from stepscope.studies.memory.rows import Accounted, accounted
from stepscope.studies.registry import find_study
from stepscope.training.plans import prediction_for

RESULTS = Path(__file__).resolve().parents[2] / "results"


@pytest.fixture(scope="module")
def cases() -> list[Accounted]:
    return accounted(find_study("memory").results(read_records(RESULTS / "memory_h200.jsonl")))


def test_every_size_context_and_dtype_of_the_course_is_recorded(cases: list[Accounted]) -> None:
    steps = {
        (case.workload.size, case.workload.context, case.workload.dtype)
        for case in cases
        if case.workload.mode == "train-step"
    }
    sizes, dtypes = ("small", "medium", "large", "xl", "2.7b"), ("float32", "bfloat16")
    assert steps >= set(product(sizes, (128, 256, 512), (*dtypes, "bfloat16-pure")))


def test_ledgers_add_up_to_the_allocator_and_the_driver(cases: list[Accounted]) -> None:
    for case in cases:
        assert case.unattributed_share <= 0.01, case.name
        assert case.driver_unattributed_share is not None
        assert case.driver_unattributed_share <= 0.01, case.name


def test_peaks_were_predicted(cases: list[Accounted]) -> None:
    off = {case.name: abs(case.prediction_off or 0.0) for case in cases}
    assert statistics.median(off.values()) <= 0.001
    assert max(off.values()) <= 0.01, off


@pytest.mark.parametrize("size", ["small", "xl", "2.7b"])
def test_the_prediction_equals_the_recorded_one(cases: list[Accounted], size: str) -> None:
    case = next(case for case in cases if case.workload.size == size)
    predicted = prediction_for(case.workload, "cuda")
    assert predicted is not None
    assert predicted.peak.allocated == case.bytes("predicted_bytes")


def test_checkpointed_peaks_were_predicted() -> None:
    records = read_records(RESULTS / "checkpointing_h200.jsonl")
    tried = [StrategyRun(result) for result in find_study("checkpointing").results(records)]
    ran = [each for each in tried if each.ok]
    assert len(ran) >= 10
    for each in ran:
        assert each.off is not None
        assert abs(each.off) <= 0.01, each.strategy
