"""The memory study on a GPU: the account closes, the prediction holds, the snapshot can be read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.analysis.snapshot import read_snapshot
from stepscope.records.memory import (
    LIBRARIES,
    MODEL_BUILT,
    RECOMPUTED,
    STEP_END,
    WITHIN_OPERATORS,
)
from stepscope.studies.base import Measurement
from stepscope.studies.registry import find_study
from stepscope.studies.trace.measure import TRACES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


class CudaBench:
    def __init__(self) -> None:
        from stepscope.measure.device import pick_device

        self.device = pick_device("cuda")

    def progress(self, done: int, total: int, what: str) -> None:
        pass


def measured(
    mode: str,
    dtype: str,
    attention: str = "reference",
    context: int = 256,
    checkpoint: str = "no",
    **forms: Any,
) -> Measurement:
    study = find_study("memory")
    flags = study.flags(
        size=("small",), context=(context,), dtype=(dtype,), attention=(attention,), mode=(mode,),
        checkpoint=(checkpoint,), **forms,
    )  # fmt: skip
    (case,) = study.cases(flags)
    bench = CudaBench()
    bench.device.release()
    return study.measure(case, bench)


def of_step(done: Measurement) -> dict[str, float]:
    """Quantities of the entire step by name."""
    return {one.name: one.value for one in done.quantities if not one.phase}


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16-pure"])
@pytest.mark.parametrize("mode", ["forward", "train-step"])
def test_the_account_closes_and_the_prediction_holds(mode: str, dtype: str, attention: str) -> None:
    done = measured(mode, dtype, attention)
    held = of_step(done)
    for peak in done.attachments["ledger"]:
        assert abs(peak.residual) <= 0.01 * peak.allocated, (peak.phase, peak.residual)
    assert held["predicted_bytes"] == pytest.approx(held["peak_bytes"], rel=0.05)
    for end in done.attachments["ends"]:
        assert abs(end.residual) <= 0.01 * end.allocated, (end.phase, end.residual)


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ,
    reason="the driver counts what all processes hold: run it without -n",
)
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16-pure"])
@pytest.mark.parametrize("mode", ["forward", "train-step"])
def test_the_driver_s_memory_is_the_context_and_the_allocator_s(
    mode: str, dtype: str, attention: str
) -> None:
    done = measured(mode, dtype, attention)
    held = of_step(done)
    rest = held["driver_bytes"] - held["context_bytes"] - held["reserved_bytes"]
    assert abs(rest) <= 0.01 * held["peak_bytes"]


def test_a_case_after_another_in_one_process_has_the_same_account() -> None:
    first = measured("forward", "float32")
    measured("train-step", "bfloat16", "sdpa", context=512)
    again = measured("forward", "float32")
    for name in ("peak_bytes", "predicted_bytes", "library_bytes"):
        assert of_step(again)[name] == of_step(first)[name], name


def test_what_allocator_and_driver_hold_is_kept_for_every_moment() -> None:
    done = measured("train-step", "float32")
    moments = done.attachments["standing"]
    names = [MODEL_BUILT, "forward", "loss", "backward", "optimizer", STEP_END]
    assert list(moments) == names
    assert [end.phase for end in done.attachments["ends"]] == names
    for moment in moments.values():
        assert 0 < moment.allocated <= moment.reserved < moment.driver


def test_the_line_of_the_largest_tensor_is_known_in_the_backward_too() -> None:
    done = measured("train-step", "float32", context=128)
    operator, _, code = done.notes["largest"].partition(" at ")
    assert operator.startswith("aten.")
    assert ".py:" in code


def test_work_space_and_inner_memory_are_lines() -> None:
    done = measured("train-step", "float32", context=1024)
    backward = next(p for p in done.attachments["ledger"] if p.phase == "backward")
    assert backward.lines[LIBRARIES] > 0
    # The backward of softmax multiplies gradient and output within itself.
    assert backward.lines[WITHIN_OPERATORS] >= 0


def test_a_snapshot_is_written_and_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACES, str(tmp_path))
    # So long that activations hold the peak: what the backward makes has no Python stack.
    done = measured("train-step", "float32", context=1024)
    assert "snapshot_missing" not in done.notes
    assert {"plain", "history"} <= {series.name for series in done.series}
    held = read_snapshot(tmp_path / done.notes["snapshot"])
    assert held.peak == pytest.approx(of_step(done)["peak_bytes"], rel=0.02)
    assert any("layers.py" in place.code for place in held.places)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpoint", ["1", "4", "4-1", "nested"])
def test_checkpointed_steps_are_predicted_and_accounted_for(checkpoint: str, dtype: str) -> None:
    done = measured("train-step", dtype, "sdpa", context=1024, checkpoint=checkpoint)
    held = of_step(done)
    assert held["predicted_bytes"] == pytest.approx(held["peak_bytes"], rel=0.05)
    backward = next(p for p in done.attachments["ledger"] if p.phase == "backward")
    assert abs(backward.residual) <= 0.01 * backward.allocated
    assert backward.lines[RECOMPUTED] > 0


JOINED = {"fused": True, "joined": True}


@pytest.mark.parametrize("optimizer", ["stepscope-fused", "stepscope-in-backward"])
@pytest.mark.parametrize(
    "form",
    [{"fused": True}, *(JOINED | {"keep": keep} for keep in ("all", "norms", "gates", "inputs-6"))],
    ids=lambda form: form.get("keep", "fused"),
)
@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16-pure"])
def test_the_forms_of_the_fast_step_are_predicted(
    dtype: str, form: dict[str, Any], optimizer: str
) -> None:
    done = measured(
        "train-step", dtype, "sdpa_flash", 1024, loss=("fused",), optimizer=(optimizer,), **form
    )
    held = of_step(done)
    assert held["predicted_bytes"] == pytest.approx(held["peak_bytes"], rel=0.02)


def test_master_weights_are_predicted() -> None:
    done = measured("train-step", "bfloat16-master")
    held = of_step(done)
    assert held["predicted_bytes"] == pytest.approx(held["peak_bytes"], rel=0.05)


def test_the_course_of_a_step_reaches_the_tensors_at_the_peak() -> None:
    done = measured("train-step", "bfloat16")
    points = done.attachments["course"]
    assert {point.phase for point in points} == {"forward", "loss", "backward", "optimizer"}
    most = max(sum(point.kinds.values()) for point in points)
    assert 0.8 * of_step(done)["peak_bytes"] <= most <= of_step(done)["peak_bytes"]


def test_a_budget_is_kept_by_the_strategy_that_was_chosen_for_it() -> None:
    study = find_study("checkpointing")
    flags = study.flags(size=("small",), context=(1024,), checkpoint=("no",), budget_gib=4.0)
    plain, limited = study.cases(flags)
    bench = CudaBench()
    bench.device.release()
    assert of_step(study.measure(plain, bench))["peak_bytes"] > 4 << 30
    bench.device.release()
    done = study.measure(limited, bench)
    assert done.notes["strategy"] != "no"
    assert of_step(done)["peak_bytes"] <= 4 << 30


def test_a_case_that_runs_out_is_examined() -> None:
    """Under a limit that a step with all activations does not fit into."""
    bench = CudaBench()
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
        noted = study.post_mortem(case, bench, str(refused.value))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    found = noted["post_mortem"]
    assert found.limit == pytest.approx(limit, rel=0.02)
    assert found.asked > 0
    assert found.held > 0
    assert found.remedies
