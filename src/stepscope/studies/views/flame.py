"""The flame graph of a step: time by module and kernel, memory by module and operator."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.flame import Profile, memory_stacks, time_stacks, tree
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
    if saved:
        stacks = tuple(memory_stacks(saved))
        profiles.append(Profile(f"{record.case}: saved for backward", "bytes", stacks))
    return profiles


def flame_blocks(
    summary: Summary | None, saved: Sequence[SavedTensor], name: str
) -> tuple[Flame, ...]:
    """Empty without a trace that names modules and without saved tensors."""
    views = []
    if summary is not None and any(use.module for use in summary.uses):
        views.append(FlameView(label="time", unit="ms", root=tree(time_stacks(summary))))
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
