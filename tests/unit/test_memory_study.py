"""The memory study, measured on this CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quiet_bench import QuietBench
from sample_records import value_of
from stepscope.errors import UsageError
from stepscope.measure.device import pick_device
from stepscope.records.memory import KEPT_INPUT, MODEL_BUILT, OPTIMIZER, RECOMPUTED, STEP_END
from stepscope.studies.memory import measure
from stepscope.studies.memory.cases import MemoryFlags
from stepscope.studies.registry import find_study
from stepscope.training.traced import TRACES
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import Workload

GIB = 1 << 30
FORWARD = Workload(
    size="tiny",
    context=8,
    batch=1,
    dtype="float32",
    attention="sdpa",
    mode="forward",
    overrides={"vocab": 32},
)


def test_a_case_on_this_machine_is_predicted_and_attributed() -> None:
    study = find_study("memory")
    flags = MemoryFlags(
        size=("tiny",), context=(32,), batch=(2,), vocab=97, mode=("train-step",), steps=2
    )
    (case,) = study.cases(flags)
    measured = study.measure(case, QuietBench())
    phases = measured.attachments["ledger"]
    highest = value_of(measured.quantities, "peak_bytes")
    assert highest == max(peak.allocated for peak in phases)
    for phase in phases:
        # Each parameter's step count is on the host, which is the device here.
        predicted = value_of(measured.quantities, "predicted_bytes", phase=phase.phase)
        assert predicted == pytest.approx(phase.allocated, abs=200)
        peak = value_of(measured.quantities, "peak_bytes", phase=phase.phase)
        assert peak == phase.allocated
    modules = {tensor.module.split(".")[0] for tensor in measured.attachments["saved"]}
    assert modules == {"blocks", "norm", "head", "loss"}
    timed = {"step", "forward", "loss", "backward", "optimizer"}
    assert {s.name for s in measured.series} == timed
    ends = measured.attachments["ends"]
    assert [end.phase for end in ends] == [MODEL_BUILT, *(peak.phase for peak in phases), STEP_END]
    assert all(end.unattributed == 0 for end in ends)
    # Weights, tables and tokens before the first step; the moments remain after a step.
    assert ends[-1].allocated - ends[0].allocated == ends[-1].lines[OPTIMIZER]
    course = measured.attachments["course"]
    assert [*dict.fromkeys(point.phase for point in course)] == [peak.phase for peak in phases]
    assert max(sum(point.kinds.values()) for point in course) == highest


def test_a_checkpointed_case_names_what_is_saved_and_recomputed() -> None:
    study = find_study("memory")
    flags = MemoryFlags(
        size=("tiny",),
        context=(32,),
        batch=(2,),
        vocab=97,
        layers=4,
        d_model=32,
        d_ff=64,
        heads=2,
        mode=("forward-backward",),
        checkpoint=("2",),
        steps=2,
    )
    (case,) = study.cases(flags)
    measured = study.measure(case, QuietBench())
    loss, backward = measured.attachments["ledger"][1:]
    stream = 2 * 32 * 32 * 4
    assert loss.lines[f"saved: {KEPT_INPUT}"] == 2 * stream
    assert not any("attention" in line or "feed_forward" in line for line in loss.lines)
    assert backward.lines[RECOMPUTED] > 4 * stream
    assert backward.unattributed == 0


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(UsageError, match="steps is 1"):
        MemoryFlags(steps=1)


def test_a_recorder_that_raises_costs_the_snapshot_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a torch built without CUDA's allocator, or with a different one."""

    def refuse(**_: Any) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory\nmore")

    monkeypatch.setenv(TRACES, str(tmp_path))
    monkeypatch.setattr("torch.cuda.memory._record_memory_history", refuse)
    device = pick_device("cpu")
    step = TransformerStep(FORWARD, device)
    assert measure._snapshot(step, device, FORWARD) == {}
    device.kind = "cuda"
    noted = measure._snapshot(step, device, FORWARD)
    assert noted == {
        "snapshot_missing": "RuntimeError: cudaMallocAsync does not yet support recordHistory"
    }
