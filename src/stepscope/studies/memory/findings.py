"""What the memory study says, in sentences that carry their numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from stepscope.records.memory import LIBRARIES, PARAMETERS, TEMPORARIES
from stepscope.records.schema import Record
from stepscope.report.blocks import Finding, Tone
from stepscope.report.format import bytes_, number, percent
from stepscope.studies.memory.comparisons import attention_findings, autocast_findings
from stepscope.studies.memory.regimes import regime_findings
from stepscope.studies.memory.rows import Accounted
from stepscope.studies.memory.running_out import first_to_run_out, post_mortem_findings
from stepscope.studies.plans import prediction_for

_CLOSED = 0.01
_PREDICTED = 0.05
_COPIED = 0.5
"""Temporaries of this share of the parameters are copies of them."""


def memory_findings(cases: Sequence[Accounted], lost: Sequence[Record]) -> tuple[Finding, ...]:
    return (
        *_prediction(cases),
        *_closure(cases),
        *_driver(cases),
        *autocast_findings(cases),
        *attention_findings(cases),
        *regime_findings(cases),
        *_optimizer(cases),
        *_largest(cases),
        *first_to_run_out(cases, lost),
        *post_mortem_findings(lost),
    )


def _prediction(cases: Sequence[Accounted]) -> Iterator[Finding]:
    off = [(abs(case.prediction_off), case) for case in cases if case.prediction_off is not None]
    if not off:
        return
    worst, case = max(off, key=lambda pair: pair[0])
    middle = statistics.median(share for share, _ in off)
    yield Finding(
        text=f"Peaks were known before the run: {_predictions(len(off))} off by"
        f" {percent(middle)} in the median and {percent(worst)} at most ({case.name}:"
        f" {bytes_(case.bytes('predicted_bytes') or 0)} predicted, {bytes_(case.peak)} measured).",
        tone="good" if worst <= _PREDICTED else "warn",
    )


def _predictions(number: int) -> str:
    if number == 1:
        return "the prediction from the configuration alone is"
    return f"{number} predictions from the configuration alone are"


def _closure(cases: Sequence[Accounted]) -> Iterator[Finding]:
    if not cases:
        return
    worst = max(cases, key=lambda case: case.residual_share)
    share = worst.residual_share
    if worst.on_cuda:
        text = (
            f"The account leaves {percent(share)} of the peak at most on no line, at the peak and"
            f" at the end of every phase ({worst.name})."
            if share
            else "The account closes to the byte, at the peak and at the end of every phase of all"
            f" {len(cases)} cases."
        )
    else:
        text = (
            "On a CPU there is no allocator to ask: the peak is the count of all tensors itself,"
            " so the account closes by construction."
        )
    costs = [case.recording_cost for case in cases if case.recording_cost is not None]
    if costs:
        text += (
            f" The step that is recorded takes {number(statistics.median(costs), 3)}× the time of"
            " a plain one; times and peaks are those of plain ones where there is an allocator to"
            " ask."
        )
    text += "".join(
        f" The allocator's own history with Python stacks makes a step of {case.name}"
        f" {number(cost.median, 3)}× as long ({number(cost.low, 3)} to {number(cost.high, 3)} in"
        f" {cost.count} rounds)."
        for case in cases
        if (cost := case.history_cost) is not None
    )
    cut = [case.name for case in cases if "snapshot_incomplete" in case.record.notes]
    if cut:
        text += (
            f" {len(cut)} snapshots are incomplete, the first of {cut[0]}: the history's buffer was"
            " full."
        )
    good: Tone = "good" if worst.on_cuda and not cut else "info"
    yield Finding(text=text, tone=good if share <= _CLOSED else "warn")


def _driver(cases: Sequence[Accounted]) -> Iterator[Finding]:
    """Why `nvidia-smi` shows more than `memory_allocated`, in one sentence."""
    asked = [case for case in cases if case.driver_residual is not None]
    if not asked:
        return
    case = max(asked, key=lambda case: case.peak)
    driver, context = case.bytes("driver_bytes") or 0, case.bytes("context_bytes") or 0
    reserved, left = case.bytes("reserved_bytes") or 0, case.driver_residual or 0
    text = (
        f"`nvidia-smi` and `memory_allocated` disagree because the driver counts what the"
        f" process holds: for {case.name} its {bytes_(driver)} are {bytes_(case.peak)} of tensors"
        f" at the peak, {bytes_(reserved - case.peak)} that the allocator keeps for later, and"
        f" {bytes_(context)} of CUDA context, kernels and libraries, measured before the model"
        " existed; "
    )
    of_peak = percent(case.driver_residual_share or 0)
    text += f"{bytes_(left)} ({of_peak} of the peak) are left over." if left else "nothing is left."
    worst = max(asked, key=lambda case: case.driver_residual_share or 0)
    share = worst.driver_residual_share or 0
    if not share and len(asked) > 1:
        text += f" It is so in all {len(asked)} cases."
    elif worst is not case:
        text += f" Of {len(asked)} cases {percent(share)} at most are left over ({worst.name})."
    yield Finding(text=text, tone="good" if share <= _CLOSED else "warn")


def _optimizer(cases: Sequence[Accounted]) -> Iterator[Finding]:
    """Where the peak is the optimizer's: it works on copies of all tensors at once."""
    steps = [case for case in cases if case.workload.mode == "train-step"]
    highest = [
        case
        for case in steps
        if case.highest.phase == "optimizer"
        and case.workload.optimizer == "torch"
        and case.highest.lines.get(TEMPORARIES, 0) >= _COPIED * case.line(PARAMETERS)
    ]
    if not highest:
        return
    case = max(highest, key=lambda case: case.peak)
    fused = msgspec.structs.replace(case.workload, optimizer="torch-fused")
    told = prediction_for(fused, case.record.environment.device_kind)
    text = (
        f"In {len(highest)} of {len(steps)} train steps the optimizer holds the peak, not the"
        f" activations: torch's AdamW updates all tensors together, with temporaries on the way,"
        f" for {case.name} {bytes_(case.highest.lines[TEMPORARIES])} beside"
        f" {bytes_(case.line(PARAMETERS))} of parameters."
    )
    if told is not None:
        text += (
            f" Its fused form makes none: {bytes_(told.peak.allocated)} predicted instead of"
            f" {bytes_(case.peak)}."
        )
    yield Finding(text=text)


def _largest(cases: Sequence[Accounted]) -> Iterator[Finding]:
    if not cases:
        return
    case = max(cases, key=lambda case: case.bytes("largest_bytes") or 0)
    work, shape = case.workload, case.workload.shape
    if shape is None:
        return
    stream = work.batch * work.context * shape.d_model * 4
    text = (
        f"The largest single tensor of {case.name} has"
        f" {bytes_(case.bytes('largest_bytes') or 0)} ({case.record.notes.get('largest', '')});"
        f" one float32 activation of the residual stream has {bytes_(stream)}"
    )
    held = case.highest.lines.get(LIBRARIES, 0)
    text += f", the work space of cuBLAS {bytes_(held)}." if held else "."
    yield Finding(text=text)
