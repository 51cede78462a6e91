"""Findings on the energy and power of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stepscope.analysis.power import Capped, Draw, draw
from stepscope.records.schema import Record
from stepscope.report.blocks import Finding
from stepscope.report.format import duration, number, percent


def energy_finding(record: Record, name: str) -> Iterator[Finding]:
    joules = record.quantity("joules")
    if joules is None:
        reason = record.notes.get("no_energy")
        if reason:
            yield Finding(
                code="energy.none",
                values={"reason": reason},
                records=(record.id,),
                text=f"The energy of a step is not available: {reason}.",
            )
        return
    resolution = record.quantity("joules_resolution") or 0.0
    each = [
        f"{number(1e3 * value, 3)} mJ per {what}"
        for what in ("token", "sample")
        if (value := record.quantity(f"joules_per_{what}")) is not None
    ]
    per_unit = f", {' and '.join(each)}" if each else ""
    drawn = draw(record)
    capped = f" It runs {at_cap_words(drawn)}." if drawn and drawn.lasts_ms is not None else ""
    yield Finding(
        code="energy.step",
        values={"step": name, "joules": joules, "resolution": resolution},
        records=(record.id,),
        text=f"A step of {name} takes {number(joules, 3)} J by the device's counter{per_unit}."
        f" The resolution of the counter is {number(resolution, 2)} J per step,"
        f" {percent(resolution / joules if joules else 0)} of it.{capped}",
    )


def at_cap_words(drawn: Draw) -> str:
    clock = _clock_words(drawn.clock_mhz, drawn.highest_mhz)
    return (
        f"at {number(drawn.watts, 3)} of {number(drawn.limit_w or 0.0, 3)} W"
        f"{f', with its clock at {clock}' if clock else ''}: at the limit that energy"
        f" takes {duration(drawn.lasts_ms or 0.0)}"
        f" (± {percent(drawn.resolution / drawn.joules if drawn.joules else 0.0)}),"
        f" and consecutive steps took {duration(drawn.step_ms)} each"
    )


def _clock_words(clock_mhz: float | None, highest_mhz: float | None) -> str:
    if clock_mhz is None:
        return ""
    of_highest = f" of {number(highest_mhz / 1e3, 3)}" if highest_mhz else ""
    return f"{number(clock_mhz / 1e3, 3)}{of_highest} GHz"


def capped_finding(
    capped: Mapping[str, Capped], records: tuple[str, ...] = ()
) -> Iterator[Finding]:
    """Meaning of a waterfall's parts at the power cap, where the clock is lower."""
    if not capped:
        return
    listed = "; ".join(
        f"{name}, in {cap.readings} of {cap.of} readings, its clock at"
        f" {_clock_words(cap.clock_mhz, cap.highest_mhz)}"
        for name, cap in capped.items()
    )
    yield Finding(
        code="energy.power-capped",
        values={name: cap.clock_mhz for name, cap in capped.items()},
        records=records,
        text=f"At the power cap: {listed}. At the cap a step takes at least its energy divided by"
        " the power limit: recovering a part shortens the step by its energy, not by its time.",
    )
