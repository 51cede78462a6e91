"""Findings of the memory study. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from stepscope.analysis.conclusions import NOTHING, Conclusion, deduced
from stepscope.attention.registry import implementation
from stepscope.records.memory import LIBRARIES, PARAMETERS, TEMPORARIES, WEIGHT_COPIES, PostMortem
from stepscope.report.blocks import Finding, Tone, Value
from stepscope.report.format import bytes_, count, percent
from stepscope.studies.memory.answers import step_findings
from stepscope.studies.memory.rows import (
    Accounted,
    Planned,
    but_for_context,
)
from stepscope.training.plans import can_be_predicted, prediction_for
from stepscope.training.post_mortem import NOTE, examined, read_refusal
from stepscope.views.builders import finding

_CLOSED = 0.01
_PREDICTED = 0.05
_COPIED = 0.5
"""Share of the parameters from which temporaries count as copies of them."""
_MAX_POST_MORTEMS = 4
"""Most post-mortems per page: each takes a second or two, because every change is predicted."""

Pair = tuple[Accounted, Accounted]


def memory_findings(cases: Sequence[Accounted], lost: Sequence[Planned]) -> tuple[Finding, ...]:
    full = [each for each in lost if each.record.status == "oom"]
    return (
        *_prediction(cases),
        *_closure(cases),
        *_incomplete(cases),
        *_autocast(cases),
        *_optimizer(cases),
        *step_findings(cases),
        *_largest(cases),
        *_longest_contexts(cases, full),
        *_post_mortems(full),
    )


def _finding(
    code: str,
    cases: Iterable[Accounted | Planned],
    values: Mapping[str, Value],
    text: str,
    tone: Tone = "info",
    conclusion: Conclusion = NOTHING,
) -> Finding:
    code = f"memory.{code}"
    return finding(code, text, cases, values, tone=tone, conclusion=conclusion, timed=False)


def _prediction(cases: Sequence[Accounted]) -> Iterator[Finding]:
    off = [(abs(case.prediction_off), case) for case in cases if case.prediction_off is not None]
    if not off:
        return
    worst, case = max(off, key=lambda pair: pair[0])
    middle = statistics.median(share for share, _ in off)
    predicted = case.bytes("predicted_bytes") or 0
    which = (
        "the prediction from the configuration alone is"
        if len(off) == 1
        else f"{len(off)} predictions from the configuration alone are"
    )
    yield _finding(
        "prediction",
        (case for _, case in off),
        {
            "predictions": len(off),
            "median": middle,
            "worst": worst,
            "step": case.name,
            "predicted": predicted,
            "measured": case.peak,
        },
        f"Peaks were predicted before the run: {which} off by"
        f" {percent(middle)} in the median and {percent(worst)} at most ({case.name}:"
        f" {bytes_(predicted)} predicted, {bytes_(case.peak)} measured).",
        "good" if worst <= _PREDICTED else "warn",
    )


def _closure(cases: Sequence[Accounted]) -> Iterator[Finding]:
    if not cases:
        return
    worst = max(cases, key=lambda case: case.unattributed_share)
    share = worst.unattributed_share
    if not worst.on_cuda:
        text = (
            "On a CPU there is no allocator to query: the peak is the count of all tensors itself,"
            " so the ledger adds up by construction."
        )
    elif share:
        text = (
            f"The ledger leaves at most {percent(share)} of the peak unattributed, at the peak and"
            f" at the end of every phase ({worst.name})."
        )
    else:
        text = (
            "The ledger adds up to the byte, at the peak and at the end of every phase of all"
            f" {len(cases)} cases."
        )
    tone: Tone = "good" if worst.on_cuda else "info"
    yield _finding(
        "account",
        cases,
        {"cases": len(cases), "unattributed": share, "step": worst.name},
        text,
        tone if share <= _CLOSED else "warn",
    )


def _incomplete(cases: Sequence[Accounted]) -> Iterator[Finding]:
    cut = [case for case in cases if "snapshot_incomplete" in case.record.notes]
    if cut:
        text = f"{len(cut)} snapshots are incomplete, the first of {cut[0].name}: the history's"
        text += " buffer was full."
        yield _finding("snapshot-incomplete", cut, {"incomplete": len(cut)}, text)


def _differing(
    cases: Sequence[Accounted], field: str, usual: str
) -> Iterator[dict[str, Accounted]]:
    """Cases that differ in one field of their workload only, by its value."""
    together: dict[str, dict[str, Accounted]] = {}
    for case in cases:
        alike = msgspec.structs.replace(case.workload, **{field: usual}).key
        together.setdefault(alike, {})[getattr(case.workload, field)] = case
    yield from together.values()


def _autocast(cases: Sequence[Accounted]) -> Iterator[Finding]:
    """Forwards in which bfloat16 needs more memory than float32, and why."""
    forwards = [case for case in cases if case.workload.mode == "forward"]
    pairs = [
        (members["float32"], members["bfloat16"])
        for members in _differing(forwards, "dtype", "float32")
        if {"float32", "bfloat16"} <= members.keys()
    ]
    if not pairs:
        return
    used = [case for pair in pairs for case in pair]
    above = [pair for pair in pairs if pair[1].peak > pair[0].peak]
    if not above:
        yield _finding(
            "autocast-less",
            used,
            {"forwards": len(pairs)},
            "bfloat16 autocast needs more memory than float32 in none of"
            f" {len(pairs)} forward passes.",
        )
        return
    wide, narrow = min(above, key=lambda pair: pair[0].workload.context)
    copies = narrow.line(WEIGHT_COPIES)
    longer, values = _at_longer_contexts(pairs, narrow)
    yield _finding(
        "autocast-more",
        used,
        {
            "more": len(above),
            "forwards": len(pairs),
            "step": narrow.name,
            "copies": copies,
            "kept_float32": wide.kept,
            "kept": narrow.kept,
            "peak": narrow.peak,
            "peak_float32": wide.peak,
            **values,
        },
        f"bfloat16 autocast needs more memory than float32 in {len(above)} of {len(pairs)}"
        f" forward passes: the weights stay in float32 and autocast caches a bfloat16 copy of each"
        f" at any context. For {narrow.name}, the copies are {bytes_(copies)}, while the saved"
        f" activations shrink only from {bytes_(wide.kept)} to {bytes_(narrow.kept)}; peak"
        f" {bytes_(narrow.peak)} against {bytes_(wide.peak)}.{longer}",
    )


def _at_longer_contexts(pairs: Sequence[Pair], narrow: Accounted) -> tuple[str, dict[str, Value]]:
    """The same comparison at longer contexts of the same model."""
    longer = sorted(
        (
            pair
            for pair in pairs
            if but_for_context(pair[1], narrow)
            and pair[1].workload.context > narrow.workload.context
        ),
        key=lambda pair: pair[1].workload.context,
    )
    if not longer:
        return "", {}
    wide, last = longer[-1]
    if last.peak <= wide.peak:
        turned = next(pair[1] for pair in longer if pair[1].peak <= pair[0].peak).workload.context
        return f" From context {count(turned)} on it needs less.", {"less_from": turned}
    text = (
        f" At context {count(last.workload.context)} it still needs more: {bytes_(last.peak)}"
        f" against {bytes_(wide.peak)}, with {bytes_(last.kept)} of saved activations against"
        f" {bytes_(wide.kept)}"
    )
    if last.on_cuda and implementation(last.workload.attention).saves_scores:
        text += (
            ". They do not halve, because autocast runs softmax in float32 and casts its output:"
            " naive attention saves both"
        )
    return f"{text}.", {"more_up_to": last.workload.context}


def _optimizer(cases: Sequence[Accounted]) -> Iterator[Finding]:
    """Steps whose peak is in the optimizer: it works on copies of all tensors at once."""
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
    temporaries, parameters = case.highest.lines[TEMPORARIES], case.line(PARAMETERS)
    fused = msgspec.structs.replace(case.workload, optimizer="torch-fused")
    predicted = prediction_for(fused, case.record.environment.device_kind)
    peak = None if predicted is None else predicted.peak.allocated
    yield _finding(
        "optimizer-peak",
        steps,
        {
            "highest": len(highest),
            "steps": len(steps),
            "step": case.name,
            "temporaries": temporaries,
            "parameters": parameters,
            "peak": case.peak,
            "fused_peak": peak,
        },
        f"In {len(highest)} of {len(steps)} train steps the peak is in the optimizer, not in the"
        f" activations: torch's AdamW updates all tensors together and allocates temporaries,"
        f" for {case.name} {bytes_(temporaries)} on top of {bytes_(parameters)} of parameters.",
        conclusion=NOTHING
        if peak is None
        else deduced(
            f"The fused AdamW has none: {bytes_(peak)} predicted instead of {bytes_(case.peak)}."
        ),
    )


def _largest(cases: Sequence[Accounted]) -> Iterator[Finding]:
    if not cases:
        return
    case = max(cases, key=lambda case: case.bytes("largest_bytes") or 0)
    work, shape = case.workload, case.workload.shape
    if shape is None:
        return
    largest, workspace = case.bytes("largest_bytes") or 0, case.highest.lines.get(LIBRARIES, 0)
    stream, made_by = (
        work.batch * work.context * shape.d_model * 4,
        case.record.notes.get("largest", ""),
    )
    work_space = f", the cuBLAS workspace {bytes_(workspace)}" if workspace else ""
    yield _finding(
        "largest-tensor",
        (case,),
        {
            "step": case.name,
            "bytes": largest,
            "operator": made_by,
            "stream": stream,
            "work_space": workspace,
        },
        f"The largest single tensor of {case.name} has {bytes_(largest)} ({made_by});"
        f" one float32 activation of the residual stream has {bytes_(stream)}{work_space}.",
    )


def _longest_contexts(cases: Sequence[Accounted], full: Sequence[Planned]) -> Iterator[Finding]:
    """The longest context of each step that fits, if the sweep includes one that does not."""
    listed: list[str] = []
    used: list[Accounted | Planned] = []
    values: dict[str, Value] = {}
    for each in full:
        context = each.workload.context
        fitting = [c for c in cases if but_for_context(c, each) and c.workload.context < context]
        if not fitting or any(
            but_for_context(other, each) and other.workload.context < context for other in full
        ):
            continue
        last = max(fitting, key=lambda case: case.workload.context)
        listed.append(f"{last.name} ({bytes_(last.peak)}; {count(context)} runs out)")
        values[last.name] = context
        used += (last, each)
    if listed:
        text = f"The longest contexts that fit on this device: {'; '.join(listed)}."
        yield _finding("longest-contexts", used, values, text)


def _post_mortems(full: Sequence[Planned]) -> Iterator[Finding]:
    """Memory that a failed case would have needed, and the smallest change that fits."""
    known = [
        each
        for each in full
        if can_be_predicted(each.workload, each.record.environment.device_kind)
    ]
    for each in known[:_MAX_POST_MORTEMS]:
        record, note = each.record, each.record.attachment(NOTE, PostMortem)
        if note is None:
            here = record.environment
            refusal = read_refusal(record.reason)
            note = examined(each.workload, here.device_kind, here.device_memory_bytes, refusal)
        yield _post_mortem(each, note)
    if len(known) > _MAX_POST_MORTEMS:
        more = known[_MAX_POST_MORTEMS:]
        text = f"{len(more)} more cases ran out of memory."
        yield _finding("more-ran-out", more, {"cases": len(more)}, text)


def _post_mortem(each: Planned, note: PostMortem) -> Finding:
    entries = ", ".join(f"{line} {bytes_(size)}" for line, size in list(note.lines.items())[:3])
    requested = f" when it requested another {bytes_(note.asked)}" if note.asked else ""
    fits = "; ".join(f"{remedy.words} ({bytes_(remedy.peak)})" for remedy in note.remedies)
    return _finding(
        "ran-out",
        (each,),
        {
            "step": each.workload.name,
            "mode": each.workload.mode,
            "phase": note.phase,
            "asked": note.asked,
            "needed": note.needed,
            "limit": note.limit,
            "missing": note.missing,
            "remedy": note.remedies[0].words if note.remedies else None,
        },
        f"{each.workload.name}, {each.workload.mode}, ran out of memory in the {note.phase}"
        f" phase{requested}: it needs {bytes_(note.needed)} of {bytes_(note.limit)},"
        f" {bytes_(note.missing)} too much. Largest entries: {entries}.",
        "warn",
        deduced(
            f"Predicted to fit, smallest change first: {fits}." if fits else "No known change fits."
        ),
    )
