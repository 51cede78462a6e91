"""The flame graph of a step: time by module and kernel, or by line of code; memory by module and
operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.analysis.flame import (
    Profile,
    Weighted,
    line_stacks,
    memory_stacks,
    time_stacks,
    tree,
)
from stepscope.analysis.lines.facts import ATTACHMENT as LINES
from stepscope.analysis.lines.facts import Lines
from stepscope.analysis.trace.summary import Summary
from stepscope.records.memory import Saved, SavedTensor
from stepscope.records.schema import Record
from stepscope.report.blocks import Flame, FlameView


def flame_profiles(record: Record) -> list[Profile]:
    """The time and the saved tensors of a record, as far as it has them."""
    summary = record.attachment("profile", Summary)
    saved = record.attachment("saved", Saved) or ()
    profiles = []
    if summary is not None and summary.uses:
        stacks = tuple(time_stacks(summary))
        profiles.append(Profile(f"{record.case}: time", "milliseconds", stacks))
    for label, stacks in _by_line(record.attachment(LINES, Lines)):
        profiles.append(Profile(f"{record.case}: {label}", "milliseconds", stacks))
    if saved:
        stacks = tuple(memory_stacks(saved))
        profiles.append(Profile(f"{record.case}: saved for backward", "bytes", stacks))
    return profiles


def flame_blocks(
    summary: Summary | None,
    saved: Sequence[SavedTensor],
    name: str,
    lines: Lines | None = None,
) -> tuple[Flame, ...]:
    """Empty without a trace that names modules and without saved tensors."""
    views = []
    if summary is not None and any(use.module for use in summary.uses):
        views.append(FlameView(label="time", unit="ms", root=tree(time_stacks(summary))))
    for label, stacks in _by_line(lines):
        views.append(FlameView(label=label, unit="ms", root=tree(stacks)))
    if saved:
        root = tree(memory_stacks(saved), "saved for backward")
        views.append(FlameView(label="memory saved for backward", unit="bytes", root=root))
    if not views:
        return ()
    return (
        Flame(
            name=f"{name}-flame",
            title="Flame graph of the step",
            views=tuple(views),
            caption="Width is time, or bytes saved for backward. Click a frame to zoom in.",
        ),
    )


def _by_line(lines: Lines | None) -> Iterator[tuple[str, tuple[Weighted, ...]]]:
    """Labels and stacks of the time by line of code, as far as it is known."""
    for label, device in (("source lines, CPU time", False), ("source lines, device time", True)):
        if lines is not None and (stacks := tuple(line_stacks(lines, device=device))):
            yield label, stacks
