"""The flash study on a GPU: kernels that ran, registers, tiles, and interleaved timings."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from quiet_bench import QuietBench
from sample_records import record, value_of
from stepscope.analysis.kernels.expected import foreign_kernels, owner
from stepscope.measure.device import pick_device
from stepscope.measure.kernels import profile_kernels
from stepscope.studies.base import CaseSkipped, Measurement
from stepscope.studies.flash import STUDY
from stepscope.studies.flash.cases import FlashFlags


def measured(changes: dict[str, Any] | None = None, **flags: Any) -> Measurement:
    case = STUDY.cases(FlashFlags(**flags))[0]
    return STUDY.measure(
        msgspec.structs.replace(case, **changes or {}), QuietBench(pick_device("cuda"))
    )


def cell(attention: str, dtype: str = "bfloat16") -> Measurement:
    return measured(
        part=("grid",),
        attention=(attention,),
        dtype=(dtype,),
        context=(1024,),
        head_dim=(64,),
        shape=(),
    )


def test_the_profiler_names_and_times_a_kernel():
    a = torch.randn(512, 512, device="cuda")
    runs = profile_kernels(lambda: torch.softmax(a, dim=-1), pick_device("cuda"))
    assert runs
    assert any("softmax" in run.name.lower() for run in runs)
    assert all(0.0 < run.ms < 10.0 for run in runs)


@pytest.mark.parametrize(
    "name", ["triton", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "compiled", "tiled"]
)
def test_each_implementation_runs_its_own_kernels(name: str):
    measurement = cell(name)
    kernels = measurement.attachments["kernels"]
    case_record = record(config={"attention": name}, attachments={"kernels": kernels})
    assert kernels["forward"]
    assert kernels["backward"]
    assert foreign_kernels(case_record) is None, kernels
    assert [(s.name, s.clock) for s in measurement.series] == [
        (mode, clock) for mode in ("both", "forward", "backward") for clock in ("device", "host")
    ]
    # Three inputs, the gradient of the output and three gradients of 1024 × 64 are a lower bound.
    assert value_of(measurement.quantities, "peak_bytes") >= 7 * 1024 * 64 * 2
    assert value_of(measurement.quantities, "error", variant="output") < 0.1


def test_an_implementation_without_float32_is_skipped():
    shapes = {"part": ("race",), "race": ("1x2x512x64:float32",)}
    with pytest.raises(CaseSkipped, match="sdpa_flash: refused"):
        measured(racers=("sdpa_flash",), **shapes)


def test_a_comparison_has_every_clock_and_names_the_kernels():
    racers = ("triton", "sdpa_flash", "sdpa_cudnn", "auto")
    many = measured(part=("race",), race=("1x4x512x64",), racers=racers)
    assert {s.variant for s in many.series if s.clock == "device"} == set(racers)
    assert owner(many.attachments["kernels"]["triton"].split("; ")[0]) == "triton"
    short = measured(part=("race",), race=("1x1x128x64",), racers=racers)
    assert {s.variant for s in short.series if s.name == "wall"} == set(racers)
