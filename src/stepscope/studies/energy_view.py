"""Energy of a step in words."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.records.schema import Record
from stepscope.report.blocks import Finding
from stepscope.report.format import number, percent


def energy_finding(record: Record, name: str) -> Iterator[Finding]:
    joules = record.quantity("joules")
    if joules is None:
        reason = record.notes.get("no_energy")
        if reason:
            yield Finding(text=f"There is no energy of a step: {reason}.")
        return
    resolution = record.quantity("joules_resolution") or 0.0
    each = [
        f"{number(1e3 * value, 3)} mJ for each {what}"
        for what in ("token", "sample")
        if (value := record.quantity(f"joules_per_{what}")) is not None
    ]
    beside = f", {' and '.join(each)}" if each else ""
    yield Finding(
        text=f"A step of {name} takes {number(joules, 3)} J by the device's own counter{beside}."
        f" One move of that counter is {number(resolution, 2)} J for each step,"
        f" {percent(resolution / joules if joules else 0)} of it."
    )
