"""What the memory study says, in sentences that carry their numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from stepscope.attention import cost as attention_cost
from stepscope.attention.cost import AttentionShape
from stepscope.attention.registry import implementation
from stepscope.model.config import precision
from stepscope.records.memory import (
    LIBRARIES,
    WEIGHT_COPIES,
    PostMortem,
    decode_post_mortem,
)
from stepscope.records.schema import Record
from stepscope.report.blocks import Finding, Tone
from stepscope.report.format import bytes_, count, number, percent
from stepscope.studies.identity import OfStep
from stepscope.studies.memory.regimes import regime_findings
from stepscope.studies.memory.rows import Accounted, Planned
from stepscope.studies.plans import can_be_predicted
from stepscope.studies.post_mortem import NOTE, examined, read_refusal
from stepscope.studies.workload import Workload

_CLOSED = 0.01
_PREDICTED = 0.05
_MOST_POST_MORTEMS = 4
"""Each takes a second or two: every change is predicted."""


def memory_findings(cases: Sequence[Accounted], lost: Sequence[Record]) -> tuple[Finding, ...]:
    return (
        *_prediction(cases),
        *_closure(cases),
        *_driver(cases),
        *_autocast(cases),
        *_attention(cases),
        *regime_findings(cases),
        *_largest(cases),
        *_first_to_run_out(cases, lost),
        *_post_mortems(lost),
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
    history = [case.history_cost for case in cases if case.history_cost is not None]
    if history:
        text += (
            f" The allocator's own history with Python stacks costs"
            f" {percent(max(0.0, statistics.median(history)))} of a step."
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
        f" existed; {bytes_(left)} ({percent(case.driver_residual_share or 0)} of the peak) are"
        " left over."
    )
    worst = max(asked, key=lambda case: case.driver_residual_share or 0)
    share = worst.driver_residual_share or 0
    if worst is not case:
        text += f" Of {len(asked)} cases {percent(share)} at most are left over ({worst.name})."
    yield Finding(text=text, tone="good" if share <= _CLOSED else "warn")


def _pairs(
    cases: Sequence[Accounted], field: str
) -> Iterator[tuple[tuple[object, ...], dict[str, Accounted]]]:
    """Cases that differ in one field of their workload alone."""
    together: dict[str, dict[str, Accounted]] = {}
    for case in cases:
        blank = {"mode": case.workload.mode} | {field: ""}
        key = repr(msgspec.to_builtins(case.workload) | blank)
        together.setdefault(key, {})[getattr(case.workload, field)] = case
    for key, members in together.items():
        if len(members) > 1:
            yield (key,), members


def _autocast(cases: Sequence[Accounted]) -> Iterator[Finding]:
    """Where bfloat16 needs more than float32 in the forward, and why."""
    pairs = [
        (members["float32"], members["bfloat16"])
        for _, members in _pairs(cases, "dtype")
        if {"float32", "bfloat16"} <= members.keys()
        and members["float32"].workload.mode == "forward"
    ]
    above = [pair for pair in pairs if pair[1].peak > pair[0].peak]
    if not pairs:
        return
    if not above:
        yield Finding(
            text=f"In none of {len(pairs)} forwards does bfloat16 autocast need more than float32."
        )
        return
    wide, narrow = min(above, key=lambda pair: pair[0].workload.context)
    copies = narrow.line(WEIGHT_COPIES)
    yield Finding(
        text=f"bfloat16 autocast needs more than float32 in {len(above)} of {len(pairs)} forwards:"
        f" the weights stay in float32 and autocast keeps a copy of each in bfloat16, whatever the"
        f" context. For {narrow.name}, the copies are {bytes_(copies)}, while the activations kept"
        f" shrink only from {bytes_(wide.kept)} to {bytes_(narrow.kept)}; peak"
        f" {bytes_(narrow.peak)} against {bytes_(wide.peak)}.{_longer(pairs, narrow)}"
    )


def _longer(pairs: Sequence[tuple[Accounted, Accounted]], narrow: Accounted) -> str:
    """Whether a longer context of the same model turns that around."""
    longer = [
        pair
        for pair in pairs
        if _but_for_context(pair[1], narrow) and pair[1].workload.context > narrow.workload.context
    ]
    if not longer:
        return ""
    wide, last = max(longer, key=lambda pair: pair[1].workload.context)
    if last.peak <= wide.peak:
        turned = min(
            (pair for pair in longer if pair[1].peak <= pair[0].peak),
            key=lambda pair: pair[1].workload.context,
        )
        return f" From context {count(turned[1].workload.context)} on it is less."
    text = (
        f" At context {count(last.workload.context)} it is still so: {bytes_(last.peak)} against"
        f" {bytes_(wide.peak)}, with {bytes_(last.kept)} of activations kept against"
        f" {bytes_(wide.kept)}"
    )
    if last.on_cuda and implementation(last.workload.attention).saves_scores:
        text += (
            ". They do not halve, because autocast runs softmax in float32 and casts what comes"
            " out: attention written out keeps both"
        )
    return f"{text}."


def _attention(cases: Sequence[Accounted]) -> Iterator[Finding]:
    """Attention that keeps its scores against one that does not."""
    best: tuple[float, Accounted, Accounted] | None = None
    for _, members in _pairs(cases, "attention"):
        naive = members.get("reference")
        flash = next(
            (case for name, case in members.items() if not implementation(name).saves_scores), None
        )
        if naive is not None and flash is not None and flash.peak:
            gain = naive.peak / flash.peak
            if best is None or gain > best[0]:
                best = (gain, naive, flash)
    if best is None:
        return
    gain, naive, flash = best
    yield Finding(
        text=f"Flash attention does change the memory, not its traffic alone:"
        f" {naive.name} keeps {bytes_(naive.kept)} of activations and peaks at"
        f" {bytes_(naive.peak)}; with {flash.workload.attention} it keeps {bytes_(flash.kept)} and"
        f" peaks at {bytes_(flash.peak)}, {number(gain, 3)}× less. What it leaves out grows with"
        f" the square of the context. {_traffic(naive)}"
    )


def _traffic(naive: Accounted) -> str:
    """Bytes that attention reads and writes in one step, from the shapes of its tensors."""
    work, form = naive.workload, precision(naive.workload.dtype)
    model = work.model()
    shape = AttentionShape(
        batch=work.batch, heads=model.n_heads, seq_q=work.context, seq_k=work.context,
        d_head=model.d_head,
    )  # fmt: skip
    width = 4 if form.compute in ("float32", "tf32") else 2
    wide = form.autocast and naive.on_cuda
    once = work.mode == "forward"
    written_out = attention_cost.reference_forward_bytes(shape, width, float32_softmax=wide)
    flash = attention_cost.forward_bytes(shape, width)
    if not once:
        written_out += attention_cost.reference_backward_bytes(shape, width, float32_softmax=wide)
        flash += attention_cost.backward_bytes(shape, width)
    return (
        f"In traffic the difference is larger: by the shapes of what each operator reads and"
        f" writes, attention written out moves {bytes_(written_out * model.n_layers)} in"
        f" {'a forward' if once else 'a step'}, a flash form at least"
        f" {bytes_(flash * model.n_layers)}, {number(written_out / flash, 3)}× less."
    )


def _largest(cases: Sequence[Accounted]) -> Iterator[Finding]:
    if not cases:
        return
    case = max(cases, key=lambda case: case.bytes("largest_bytes") or 0)
    work = case.workload
    stream = work.batch * work.context * work.model().d_model * 4
    text = (
        f"The largest single tensor of {case.name} has"
        f" {bytes_(case.bytes('largest_bytes') or 0)} ({case.record.notes.get('largest', '')});"
        f" one float32 activation of the residual stream has {bytes_(stream)}"
    )
    held = case.highest.lines.get(LIBRARIES, 0)
    text += f", the work space of cuBLAS {bytes_(held)}." if held else "."
    yield Finding(text=text)


def _first_to_run_out(cases: Sequence[Accounted], lost: Sequence[Record]) -> Iterator[Finding]:
    """Up to which context each step fits, where the sweep went on to one that does not."""
    full = [Planned(record) for record in lost if record.status == "oom"]
    told = []
    for each in full:
        fitting = [case for case in cases if _but_for_context(case, each)]
        shorter = [c for c in fitting if c.workload.context < each.workload.context]
        if not shorter or any(
            _but_for_context(other, each) and other.workload.context < each.workload.context
            for other in full
        ):
            continue
        last = max(shorter, key=lambda case: case.workload.context)
        told.append(f"{last.name} ({bytes_(last.peak)}; {count(each.workload.context)} runs out)")
    if told:
        yield Finding(text=f"The longest contexts that fit this device: {'; '.join(told)}.")


def _but_for_context(one: OfStep, other: OfStep) -> bool:
    alike = msgspec.structs.replace(one.workload, context=other.workload.context)
    return alike == other.workload


def _post_mortems(lost: Sequence[Record]) -> Iterator[Finding]:
    """What a case that ran out would have needed, and the smallest change that fits."""
    full = [
        (record, workload)
        for record in lost
        if record.status == "oom"
        and can_be_predicted(workload := msgspec.convert(record.config, Workload))
    ]
    for record, workload in full[:_MOST_POST_MORTEMS]:
        if NOTE in record.notes:
            found = decode_post_mortem(record.notes[NOTE])
        else:
            room = record.environment.device_memory_bytes
            kind = record.environment.device_kind
            found = examined(workload, kind, room, read_refusal(record.reason))
        yield Finding(text=post_mortem_words(workload, found), tone="warn")
    if len(full) > _MOST_POST_MORTEMS:
        yield Finding(text=f"{len(full) - _MOST_POST_MORTEMS} more cases ran out of memory.")


def post_mortem_words(workload: Workload, found: PostMortem) -> str:
    held = ", ".join(f"{line} {bytes_(size)}" for line, size in list(found.lines.items())[:3])
    asked = f" when it asked for another {bytes_(found.asked)}" if found.asked else ""
    fits = "; ".join(f"{each.words} ({bytes_(each.peak)})" for each in found.remedies)
    return (
        f"{workload.name}, {workload.mode}, ran out in the {found.phase} phase{asked}: it needs"
        f" {bytes_(found.needed)} of {bytes_(found.limit)}, {bytes_(found.missing)} too much. Most"
        f" of what it held is {held}."
        + (f" Predicted to fit, smallest change first: {fits}." if fits else
           " No change that is known here fits.")
    )  # fmt: skip
