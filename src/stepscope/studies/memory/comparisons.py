"""Cases that differ in one thing alone: autocast against float32, flash attention against naive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from stepscope.attention import cost as attention_cost
from stepscope.attention.cost import AttentionShape
from stepscope.attention.registry import implementation
from stepscope.model.config import precision
from stepscope.records.memory import WEIGHT_COPIES
from stepscope.report.blocks import Finding
from stepscope.report.format import bytes_, count, number
from stepscope.studies.memory.rows import Accounted, but_for_context


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


def autocast_findings(cases: Sequence[Accounted]) -> Iterator[Finding]:
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
        if but_for_context(pair[1], narrow) and pair[1].workload.context > narrow.workload.context
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


def attention_findings(cases: Sequence[Accounted]) -> Iterator[Finding]:
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
