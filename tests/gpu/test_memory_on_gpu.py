"""The memory study on a GPU: the ledger adds up, the prediction is close, a snapshot is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from quiet_bench import QuietBench
from stepscope.analysis.snapshot import read_snapshot
from stepscope.measure.device import pick_device
from stepscope.records.memory import LIBRARIES, MODEL_BUILT, RECOMPUTED, STEP_END, WITHIN_OPERATORS
from stepscope.studies.base import Measurement
from stepscope.studies.registry import find_study
from stepscope.training.traced import TRACES


def measured(
    mode: str,
    dtype: str,
    attention: str = "reference",
    context: int = 256,
    checkpoint: str = "no",
    **options: Any,
) -> Measurement:
    study = find_study("memory")
    flags = study.flags(
        size=("small",), context=(context,), dtype=(dtype,), attention=(attention,), mode=(mode,),
        checkpoint=(checkpoint,), **options,
    )  # fmt: skip
    (case,) = study.cases(flags)
    bench = QuietBench(pick_device("cuda"))
    bench.device.release()
    return study.measure(case, bench)


def of_step(done: Measurement) -> dict[str, float]:
    """Quantities of the entire step by name."""
    return {one.name: one.value for one in done.quantities if not one.phase}


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16-pure"])
@pytest.mark.parametrize("mode", ["forward", "train-step"])
def test_the_ledger_adds_up_and_the_prediction_is_close(
    mode: str, dtype: str, attention: str
) -> None:
    done = measured(mode, dtype, attention)
    values = of_step(done)
    for peak in done.attachments["ledger"]:
        assert abs(peak.unattributed) <= 0.01 * peak.allocated, (peak.phase, peak.unattributed)
    assert values["predicted_bytes"] == pytest.approx(values["peak_bytes"], rel=0.05)
    for end in done.attachments["ends"]:
        assert abs(end.unattributed) <= 0.01 * end.allocated, (end.phase, end.unattributed)


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ,
    reason="the driver counts the memory of all processes: run it without -n",
)
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16-pure"])
@pytest.mark.parametrize("mode", ["forward", "train-step"])
def test_driver_memory_is_the_context_and_the_reserved_memory(
    mode: str, dtype: str, attention: str
) -> None:
    done = measured(mode, dtype, attention)
    values = of_step(done)
    rest = values["driver_bytes"] - values["context_bytes"] - values["reserved_bytes"]
    assert abs(rest) <= 0.01 * values["peak_bytes"]


def test_a_later_case_in_one_process_has_the_same_ledger() -> None:
    first = measured("forward", "float32")
    measured("train-step", "bfloat16", "sdpa", context=512)
    again = measured("forward", "float32")
    for name in ("peak_bytes", "predicted_bytes", "library_bytes"):
        assert of_step(again)[name] == of_step(first)[name], name


def test_allocator_and_driver_memory_are_recorded_after_every_phase() -> None:
    done = measured("train-step", "float32")
    moments = done.attachments["standing"]
    names = [MODEL_BUILT, "forward", "loss", "backward", "optimizer", STEP_END]
    assert list(moments) == names
    assert [end.phase for end in done.attachments["ends"]] == names
    for moment in moments.values():
        assert 0 < moment.allocated <= moment.reserved < moment.driver


def test_the_code_line_of_the_largest_tensor_is_known_in_the_backward() -> None:
    done = measured("train-step", "float32", context=128)
    operator, _, code = done.notes["largest"].partition(" at ")
    assert operator.startswith("aten.")
    assert ".py:" in code


def test_workspaces_and_temporaries_within_operators_are_lines() -> None:
    done = measured("train-step", "float32", context=1024)
    backward = next(p for p in done.attachments["ledger"] if p.phase == "backward")
    assert backward.lines[LIBRARIES] > 0
    # The backward pass of softmax has a temporary for gradient times output.
    assert backward.lines[WITHIN_OPERATORS] >= 0


def test_a_snapshot_is_written_and_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACES, str(tmp_path))
    # A context at which activations are the peak: tensors of backward passes have no Python stack.
    done = measured("train-step", "float32", context=1024)
    assert "snapshot_missing" not in done.notes
    snapshot = read_snapshot(tmp_path / done.notes["snapshot"])
    assert snapshot.peak == pytest.approx(of_step(done)["peak_bytes"], rel=0.02)
    assert any("layers.py" in place.code for place in snapshot.places)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpoint", ["1", "4", "4-1", "nested"])
def test_checkpointed_steps_are_predicted_and_in_the_ledger(checkpoint: str, dtype: str) -> None:
    done = measured("train-step", dtype, "sdpa", context=1024, checkpoint=checkpoint)
    values = of_step(done)
    assert values["predicted_bytes"] == pytest.approx(values["peak_bytes"], rel=0.05)
    backward = next(p for p in done.attachments["ledger"] if p.phase == "backward")
    assert abs(backward.unattributed) <= 0.01 * backward.allocated
    assert backward.lines[RECOMPUTED] > 0


JOINED = {"fused": True, "fused_projections": True}


@pytest.mark.parametrize("optimizer", ["stepscope-fused", "stepscope-in-backward"])
@pytest.mark.parametrize(
    "options",
    [
        {"fused": True},
        *(JOINED | {"activation_policy": keep} for keep in ("all", "norms", "gates", "inputs-6")),
    ],
    ids=lambda options: options.get("activation_policy", "fused"),
)
@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16-pure"])
def test_variants_of_the_fast_step_are_predicted(
    dtype: str, options: dict[str, Any], optimizer: str
) -> None:
    done = measured(
        "train-step", dtype, "sdpa_flash", 1024, loss=("fused",), optimizer=(optimizer,), **options
    )
    values = of_step(done)
    assert values["predicted_bytes"] == pytest.approx(values["peak_bytes"], rel=0.02)


def test_master_weights_are_predicted() -> None:
    done = measured("train-step", "bfloat16-master")
    values = of_step(done)
    assert values["predicted_bytes"] == pytest.approx(values["peak_bytes"], rel=0.05)


def test_the_memory_timeline_reaches_the_peak() -> None:
    done = measured("train-step", "bfloat16")
    points = done.attachments["course"]
    assert {point.phase for point in points} == {"forward", "loss", "backward", "optimizer"}
    most = max(sum(point.kinds.values()) for point in points)
    assert 0.8 * of_step(done)["peak_bytes"] <= most <= of_step(done)["peak_bytes"]


def test_a_case_that_runs_out_of_memory_has_a_post_mortem() -> None:
    """Under a limit below the memory of a step that saves all activations."""
    bench = QuietBench(pick_device("cuda"))
    bench.device.release()
    limit = 4 << 30
    torch.cuda.set_per_process_memory_fraction(limit / bench.device.memory_bytes)
    study = find_study("benchmark")
    flags = study.flags(size=("small",), context=(1024,), mode=("train-step",))
    (planned,) = study.planned(flags)
    case = study.decode(planned.config)
    try:
        with pytest.raises(torch.OutOfMemoryError) as refused:
            study.measure(case, bench)
        attachments = study.post_mortem(case, bench, str(refused.value))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    post_mortem = attachments["post_mortem"]
    assert post_mortem.limit == pytest.approx(limit, rel=0.02)
    assert post_mortem.asked > 0
    assert post_mortem.held > 0
    assert post_mortem.remedies
