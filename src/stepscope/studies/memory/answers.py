"""Findings on the peaks of each mode, context and dtype, and on what one block stores. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from stepscope.records.memory import SavedTensor
from stepscope.report.blocks import Finding, Table, Value
from stepscope.report.format import bytes_, count, counted, percent
from stepscope.report.tables import col, table
from stepscope.studies.memory.rows import Accounted, Block, leading
from stepscope.views.builders import finding, grouped

_LARGEST = 5


def step_findings(cases: Sequence[Accounted]) -> Iterator[Finding]:
    if not cases:
        return
    lead, forward = leading(cases)
    yield from _phases(lead)
    yield from _peaks(cases, lead)
    yield from _mixed_precision(cases)
    yield from _residual_stream(forward or lead)
    if (block := Block.of(lead)) is not None:
        yield _block_saved(block)
        yield from _block_gradients(block)


def _phases(case: Accounted) -> Iterator[Finding]:
    """Whether the phases of a step can be distinguished by the memory at their ends and peaks."""
    ends = {end.phase: end.allocated for end in case.ends}
    if not ends or "forward" not in ends:
        return
    built = next(iter(ends.values()))
    peaks = {peak.phase: peak.allocated for peak in case.phases}
    highest = case.highest
    text = (
        f"{case.name}: the forward pass begins at {bytes_(built)} and grows to"
        f" {bytes_(ends['forward'])} at its end, by what it saves for backward"
    )
    if "backward" in ends:
        text += (
            f"; the backward pass frees that and leaves gradients, {bytes_(ends['backward'])}; the"
            f" highest peak, {bytes_(highest.allocated)}, is in the phase {highest.phase}"
        )
    listed = ", ".join(f"{phase} {bytes_(size)}" for phase, size in peaks.items())
    yield finding(
        "memory.phases",
        f"{text}. Peaks by phase: {listed}.",
        case,
        {"step": case.name, "highest": highest.phase}
        | {f"peak of {phase}": size for phase, size in peaks.items()}
        | {f"end of {phase}": size for phase, size in ends.items()},
        timed=False,
    )


def _peaks(cases: Sequence[Accounted], lead: Accounted) -> Iterator[Finding]:
    """The peaks of the leading model in its dtype, by mode and context."""
    members = sorted(
        (case for case in cases if _alike(case) == _alike(lead)), key=lambda c: c.workload.context
    )
    if len(members) < 2:
        return
    modes = grouped(members, lambda case: case.workload.mode)
    listed = "; ".join(
        f"{mode} "
        + ", ".join(f"{bytes_(c.peak)} at context {count(c.workload.context)}" for c in those)
        for mode, those in modes.items()
    )
    work = lead.workload
    yield finding(
        "memory.peaks",
        f"Peak memory of {work.model_name} in {work.dtype}: {listed}.",
        members,
        {f"{c.workload.mode} {c.workload.context}": c.peak for c in members},
        timed=False,
    )


def _alike(case: Accounted) -> str:
    """Identity of the step without its context and mode."""
    return msgspec.structs.replace(case.workload, context=1, mode="forward").key


def _mixed_precision(cases: Sequence[Accounted]) -> Iterator[Finding]:
    """The peak under autocast over that in float32, by mode."""
    pairs: dict[str, list[tuple[Accounted, Accounted]]] = {}
    for members in grouped(
        cases, lambda case: msgspec.structs.replace(case.workload, dtype="float32").key
    ).values():
        by_dtype = {case.workload.dtype: case for case in members}
        if {"float32", "bfloat16"} <= by_dtype.keys():
            wide, narrow = by_dtype["float32"], by_dtype["bfloat16"]
            pairs.setdefault(wide.workload.mode, []).append((wide, narrow))
    if not pairs:
        return
    parts = []
    values: dict[str, Value] = {}
    for mode, listed in pairs.items():
        ratios = [narrow.peak / wide.peak for wide, narrow in listed]
        values |= {f"{mode} least": min(ratios), f"{mode} most": max(ratios)}
        wide, narrow = max(listed, key=lambda pair: pair[0].workload.context)
        between = percent(min(ratios))
        if len(ratios) > 1:
            between += f" to {percent(max(ratios))}"
        parts.append(
            f"{mode} {between} of the float32 peak ({bytes_(narrow.peak)} instead of"
            f" {bytes_(wide.peak)} at context {count(wide.workload.context)})"
        )
    yield finding(
        "memory.mixed-precision",
        f"Peaks under bfloat16 autocast: {'; '.join(parts)}.",
        [case for listed in pairs.values() for pair in listed for case in pair],
        values,
        timed=False,
    )


def _residual_stream(case: Accounted) -> Iterator[Finding]:
    work, shape = case.workload, case.workload.shape
    if shape is None:
        return
    size = work.batch * work.context * shape.d_model * 4
    yield finding(
        "memory.residual-stream",
        f"One float32 activation of the residual stream of {case.name}: {work.batch} ×"
        f" {count(work.context)} × {count(shape.d_model)} × 4 B = {bytes_(size)}.",
        case,
        {"bytes": size, "batch": work.batch, "context": work.context, "d_model": shape.d_model},
        timed=False,
    )


def _block_saved(block: Block) -> Finding:
    """What one block saves for backward, and the operations that save the most of it."""
    largest = block.saved[:_LARGEST]
    listed = ", ".join(f"{_operation(one)} {bytes_(_size(one))}" for one in largest)
    of_block = sum(map(_size, largest)) / block.saved_bytes
    share = block.saved_bytes * block.count / block.all_saved
    return finding(
        "memory.block-saved",
        f"One of {counted(block.count, 'block')} of {block.case.name} saves"
        f" {bytes_(block.saved_bytes)} for backward, all blocks {percent(share)} of what the step"
        f" saves. The {counted(len(largest), 'largest tensor')}, {percent(of_block)} of it:"
        f" {listed}.",
        block.case,
        {
            "block": block.saved_bytes,
            "blocks": block.count,
            "share_of_blocks": share,
            "share_of_largest": of_block,
        },
        timed=False,
    )


def _block_gradients(block: Block) -> Iterator[Finding]:
    """Bytes of the gradients of one block: from its parameters, and as seen in the backward."""
    expected = block.parameters * block.gradient_width
    text = (
        f"A block of {block.case.name} has {count(block.parameters)} parameters, so its gradients"
        f" take {bytes_(expected)}."
    )
    values: dict[str, Value] = {"parameters": block.parameters, "expected": expected}
    if (change := block.change) is not None:
        measured = change + block.saved_bytes
        values |= {"change": change, "measured": measured}
        grows = "grows" if change >= 0 else "falls"
        text += (
            f" Over one block of the backward pass the memory in use {grows} by"
            f" {bytes_(abs(change))}; with the {bytes_(block.saved_bytes)} that it frees, the"
            f" tensors that it produces and that stay take {bytes_(measured)}:"
            f" {percent(measured / expected)} of the expected bytes."
        )
    elif (total := block.all_gradients) is not None:
        every = block.model_parameters * block.gradient_width
        values |= {"all": total, "all_expected": every}
        text += (
            f" At the end of the backward pass all gradients take {bytes_(total)}:"
            f" {percent(total / every)} of the {bytes_(every)} that the parameters give."
        )
    yield finding("memory.block-gradients", text, block.case, values, timed=False)


def block_table(case: Accounted) -> Iterator[Table]:
    """The tensors that one block saves, largest first."""
    block = Block.of(case)
    if block is None:
        return
    yield table(
        "memory-block",
        f"Saved for backward by one block: {case.name}",
        block.saved,
        [
            col("operation", _operation),
            col("shape", lambda one: "×".join(map(str, one.shape)) or "scalar"),
            col("dtype", lambda one: one.dtype),
            col("bytes", _size, "bytes"),
            col("share of the block", lambda one: _size(one) / block.saved_bytes, "percent"),
            col("line of code", lambda one: one.code),
        ],
        caption=f"{bytes_(block.saved_bytes)} in all. A storage that several operations save counts"
        " once.",
    )


def _size(one: SavedTensor) -> int:
    return one.times * one.bytes


def _operation(one: SavedTensor) -> str:
    return f"{one.module.partition('.')[2].partition('.')[2] or 'block'}, {one.operator}"
