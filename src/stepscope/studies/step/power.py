"""What the sides of a race take in energy, each on its own without a pause: a table, sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.analysis.power import Draw
from stepscope.report.blocks import Cell, Column, Finding, Spread, Table
from stepscope.report.format import duration, number
from stepscope.studies.energy_view import at_cap_words
from stepscope.studies.step.races import SIDES
from stepscope.studies.step.rows import Race


def power_table(raced: Sequence[Race]) -> Iterator[Table]:
    rows = [
        _row(race, side, found)
        for race in raced
        for side in SIDES
        if (found := race.draw(side)) is not None
    ]
    if rows:
        yield Table(
            name="step-power",
            title="What a step takes in energy",
            columns=(
                Column(title="case"),
                Column(title="side"),
                Column(title="form"),
                Column(title="energy", kind="number", unit="J", hint="of one step"),
                Column(title="power", kind="number", unit="W", hint="mean"),
                Column(title="limit", kind="number", unit="W", hint="what the device may take"),
                Column(title="of the limit", kind="percent"),
                Column(title="SM clock", kind="number", unit="MHz", hint="median of readings"),
                Column(title="step", kind="number", unit="ms", hint="in that stretch"),
                Column(
                    title="energy lasts",
                    kind="number",
                    unit="ms",
                    hint="at the power cap: how long a step's energy lasts at the limit",
                ),
            ),
            rows=tuple(rows),
            caption="One block of consecutive steps for each side, of 1.5 to 4 s or two steps after"
            " the clock has settled, by the device's own counter, ± one increment of it. At the"
            " power cap a step takes as long as its energy lasts. Reading the counter slows a host"
            " that limits the step.",
        )


def _row(race: Race, side: str, found: Draw) -> tuple[Cell, ...]:
    joules = Spread(value=found.joules, plus_minus=found.resolution)
    return (
        race.name, side, race.form(side), joules, found.watts, found.limit_w, found.of_limit,
        found.clock_mhz, found.step_ms, found.lasts_ms,
    )  # fmt: skip


def power_findings(raced: Sequence[Race]) -> Iterator[Finding]:
    missing: dict[str, list[str]] = {}
    for race in raced:
        if reason := race.record.notes.get("no_energy"):
            missing.setdefault(reason, []).append(race.name)
        capped = {
            side: found
            for side in ("ours", *SIDES)
            if (found := race.draw(side)) is not None and found.lasts_ms is not None
        }
        if not capped:
            continue
        (first, found), *others = capped.items()
        text = f"{race.name}: {SIDES[first]} takes {number(found.joules, 3)} J a step"
        text += f" {at_cap_words(found)}."
        for side, other in others:
            text += f" {SIDES[side].capitalize()} takes {number(other.joules, 3)} J, which lasts"
            text += f" {duration(other.lasts_ms or 0.0)}."
        yield Finding(text=text)
    for reason, names in missing.items():
        yield Finding(text=f"There is no energy of the steps of {', '.join(names)}: {reason}.")
