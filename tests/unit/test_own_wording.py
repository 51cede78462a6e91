"""Sentences of findings about a recorded program or a trial that no other test checks."""

from __future__ import annotations

import msgspec
import pytest

from own_records import attached, inspected_record, tried
from stepscope.advisor.advise.view import not_evaluated_findings
from stepscope.advisor.inspect import STUDY as INSPECT
from stepscope.analysis.advice.missing_inputs import MEMORY, NotEvaluated
from stepscope.analysis.checks import check_record
from stepscope.analysis.trace.summary import LedgerLine, Summary
from stepscope.records.schema import Ceiling, Quantity, Record
from stepscope.studies.registry import viewables
from stepscope.views.program.setting import OptimizerSetting, Setting
from view_blocks import coded, findings_of

OPTIMIZER = OptimizerSetting(
    name="AdamW", of_torch=True, tensors=2, fused=False, foreach=None, knows_fused=True
)
SETTING = Setting(
    models=("Net",),
    optimizers=(OPTIMIZER, OPTIMIZER),
    compiled=False,
    parameter_formats={"float32": 10},
    matmul_precision="highest",
    distributed=False,
)


def busy_device() -> Record:
    """A step whose kernels are launched in time."""
    record = inspected_record()
    lines = (LedgerLine(phase="forward", kind="matmul", ms=1.0),)
    summary = record.required("profile", Summary)
    return attached(record, profile=msgspec.structs.replace(summary, lines=lines))


NOTES = (
    "trace_missing",
    "timed_fewer",
    "traced_fewer",
    "memory_missing",
    "snapshot_missing",
    "recording_failed",
)


def with_notes() -> Record:
    return inspected_record(notes=dict.fromkeys(NOTES, "why"))


def loop() -> Record:
    forwards = Quantity(name="forwards", value=4, unit="forwards")
    return attached(inspected_record(quantities=(forwards,)), setting=SETTING)


def above_its_rate() -> Record:
    ceiling = Ceiling(name="matmul.float32", value=1e12, unit="FLOP/s", source="measured")
    flops = Quantity(name="flops", value=2e9, unit="FLOP")
    return inspected_record(step=1.0, quantities=(flops,), ceilings=(ceiling,))


SENTENCES = {
    "inspect.not-launch-bound": (
        [busy_device()],
        "The 10 kernels of a step are launched in time during 100.0 % of it. This step is not"
        " launch-bound.",
    ),
    "inspect.ranks-missing": (
        [inspected_record(0, 3)],
        "Of 3 ranks, there are no records of: 1, 2.",
    ),
    "inspect.no-collectives": (
        [inspected_record(rank, 2) for rank in range(2)],
        "The ranks ran no collectives that could be compared.",
    ),
    "inspect.no-ceilings": (
        [inspected_record(ceilings=())],
        "The matmul rates and the bandwidth of this machine have not been measured yet, so the"
        " ideal time of this step is unknown. `stepscope advise` on these records, or on the"
        " script, measures them once.",
    ),
    "inspect.loop": (
        [loop()],
        "A step here is one full iteration of the loop: 4 forward passes per step; 2 optimizers"
        " (AdamW, AdamW).",
    ),
    "inspect.trace-missing": ([with_notes()], "The steps were not traced: why."),
    "inspect.traced-fewer": ([with_notes()], "Fewer steps were traced than requested: why."),
    "inspect.memory-missing": ([with_notes()], "There is no memory breakdown: why."),
    "inspect.snapshot-missing": ([with_notes()], "No memory snapshot was taken: why."),
    "inspect.recording-failed": ([with_notes()], "The recording failed: why."),
    "inspect.rate-too-low": (
        [above_its_rate()],
        "Matmuls would take 2.00 ms at the rates measured here, but took 160 µs:"
        " these rates were measured too low, perhaps on a busy machine (`stepscope run` with"
        " --new-ceilings measures them again), or the FLOPs are overestimated. The measured time"
        " is used as the ideal.",
    ),
    "advise.timed-apart": (
        [tried(notes={"apart": "they do not fit"})],
        "bfloat16: timed in blocks (unchanged, changed, changed, unchanged) and not interleaved:"
        " they do not fit. The interval covers drift of the machine only in part.",
    ),
}


@pytest.mark.parametrize("code", SENTENCES)
def test_wording(code: str) -> None:
    records, sentence = SENTENCES[code]
    finding = coded(viewables()[records[0].study].view(records), code)
    assert finding.sentence == sentence
    assert {*finding.records} <= {record.id for record in records}
    assert finding.records


def test_rules_with_a_missing_input_are_reported() -> None:
    left_out = [NotEvaluated(code="x", title="a change", missing=MEMORY)]
    finding = coded(not_evaluated_findings(left_out), "advice.not-evaluated")
    assert finding.values == {"changes": "a change", "missing": MEMORY}
    assert finding.text.startswith(f"Not evaluated: a change. The records have no {MEMORY}; ")


def test_each_lint_of_a_record_is_a_finding() -> None:
    record = inspected_record()
    (step, *_) = record.series
    uneven = msgspec.structs.replace(step, values=(1.0, 9.0, 1.0, 8.0, 1.0, 30.0))
    record = msgspec.structs.replace(record, series=(uneven,))
    failed = check_record(record)
    assert failed
    findings = findings_of(INSPECT.view([record]), "inspect.failed-check")
    assert [one.values["check"] for one in findings] == [check.code for check in failed]
    assert [one.text.lower() for one in findings] == [
        f"{check.message}.".lower() for check in failed
    ]
