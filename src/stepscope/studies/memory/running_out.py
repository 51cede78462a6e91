"""Cases that ran out of memory: how far the device goes, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from stepscope.records.memory import PostMortem
from stepscope.records.schema import Record
from stepscope.report.blocks import Finding
from stepscope.report.format import bytes_, count
from stepscope.studies.memory.rows import Accounted, Planned, but_for_context
from stepscope.studies.plans import can_be_predicted
from stepscope.studies.post_mortem import NOTE, examined, read_refusal
from stepscope.studies.workload import Workload

_MOST_POST_MORTEMS = 4
"""Each takes a second or two: every change is predicted."""


def first_to_run_out(cases: Sequence[Accounted], lost: Sequence[Record]) -> Iterator[Finding]:
    """Up to which context each step fits, where the sweep went on to one that does not."""
    full = [Planned(record) for record in lost if record.status == "oom"]
    told = []
    for each in full:
        fitting = [case for case in cases if but_for_context(case, each)]
        shorter = [c for c in fitting if c.workload.context < each.workload.context]
        if not shorter or any(
            but_for_context(other, each) and other.workload.context < each.workload.context
            for other in full
        ):
            continue
        last = max(shorter, key=lambda case: case.workload.context)
        told.append(f"{last.name} ({bytes_(last.peak)}; {count(each.workload.context)} runs out)")
    if told:
        yield Finding(text=f"The longest contexts that fit this device: {'; '.join(told)}.")


def post_mortem_findings(lost: Sequence[Record]) -> Iterator[Finding]:
    """What a case that ran out would have needed, and the smallest change that fits."""
    full = [
        (record, workload)
        for record in lost
        if record.status == "oom"
        and can_be_predicted(
            workload := msgspec.convert(record.config, Workload), record.environment.device_kind
        )
    ]
    for record, workload in full[:_MOST_POST_MORTEMS]:
        found = record.attachment(NOTE, PostMortem)
        if found is None:
            room = record.environment.device_memory_bytes
            kind = record.environment.device_kind
            found = examined(workload, kind, room, read_refusal(record.reason))
        yield Finding(text=_words(workload, found), tone="warn")
    if len(full) > _MOST_POST_MORTEMS:
        yield Finding(text=f"{len(full) - _MOST_POST_MORTEMS} more cases ran out of memory.")


def _words(workload: Workload, found: PostMortem) -> str:
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
