"""A step recorded on a GPU: events in the order of the backward pass, which add up to the step."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rehearsal_check import STUDY as CHECK

from quiet_bench import QuietBench
from sample_records import record
from stepscope.analysis.rehearsal.recording import recording_of
from stepscope.measure.device import pick_device
from stepscope.records.schema import Record
from stepscope.studies.rehearsal import STUDY as REHEARSAL
from view_blocks import findings_of


def recorded(study: Any = REHEARSAL, **how: object) -> Record:
    flags = study.flags(size=("small",), context=(256,), **how)
    case = study.cases(flags)[-1]
    done = study.measure(case, QuietBench(pick_device("cuda")))
    return record(
        study=study.name, case=case.key, config=case.config, series=done.series,
        quantities=done.quantities, notes=done.notes,
        attachments=msgspec.to_builtins(done.attachments),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_ready_one_after_the_other(dtype: str) -> None:
    of_step = recorded(dtype=(dtype,), attention=("sdpa",))
    assert {series.clock for series in of_step.series} == {"device"}
    recording = recording_of(of_step)
    assert recording is not None
    names = [recording.gradients[index].item.name for index in recording.order]
    # The gradient of the head is the first, that of the embedding the last.
    assert "embed" in names[-1]
    assert recording.gradients[recording.order[0]].ready < 0.5 * recording.backward_ms
    assert 0.2 < recording.half_ready() < 1.0
    step = of_step.find("step")
    assert step is not None
    assert sorted(step.values)[len(step.values) // 2] == pytest.approx(
        recording.compute_ms, rel=0.2
    )


def test_ranks_on_the_host_replay_what_the_gpu_recorded() -> None:
    of_step = recorded(CHECK, ranks=(2,), rounds=2, steps=3, compute="auto")
    assert of_step.notes["compute"] == "waits"
    shown = findings_of(CHECK.view([of_step]))
    assert any("2 waiting ranks over gloo" in finding.text for finding in shown)
