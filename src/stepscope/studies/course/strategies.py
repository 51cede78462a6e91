"""Sentences about chosen strategies of a study on several ranks. Pure.

A problem asks about two or three strategies of many that one case measures interleaved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stepscope.analysis.conclusions import NOTHING, conclude
from stepscope.analysis.effects import difference, paired
from stepscope.records.schema import Record
from stepscope.report.blocks import Finding, Value
from stepscope.report.format import duration, number, percent
from stepscope.studies.registry import find_measurable
from stepscope.views.builders import bracketed
from stepscope.views.ranks import RankedResult

ALONE = "no communication"
"""Variant of the step in which every rank trains on its own."""


def strategy_findings(records: Sequence[Record], strategies: Sequence[str]) -> Iterator[Finding]:
    """For each record, the step and the communication of the strategies, and how each compares
    with the first."""
    for record in records:
        if record.status != "ok":
            continue
        result: RankedResult[Any] = RankedResult(
            record, find_measurable(record.study).decode(record.config)
        )
        if finding := _finding(result, strategies):
            yield finding


def _finding(result: RankedResult[Any], strategies: Sequence[str]) -> Finding | None:
    known = [name for name in strategies if result.samples("step", name)]
    if not known:
        return None
    values: dict[str, Value] = {}
    parts = [_one(result, name, values) for name in known]
    base = result.samples("step", known[0])
    effects = {name: paired(base, result.samples("step", name)) for name in known[1:]}
    values |= {f"{name} over {known[0]}": effect.value for name, effect in effects.items()}
    compared = ", ".join(
        f"{bracketed(effect)} with {name}"
        + ("" if effect.shown else " (statistically indistinguishable)")
        for name, effect in effects.items()
    )
    case = result.case
    at = f" at context {case.context}" if case.context else ""
    text = f"{case.size_name}{at}, {result.label}: {'; '.join(parts)}."
    if compared:
        text += f" Step time over that of {known[0]}: {compared}."
    shown = [effect for effect in effects.values() if effect.shown]
    best = min(effects, key=lambda name: effects[name].value, default=None)
    conclusion = NOTHING
    if best is not None and effects[best].below:
        conclusion = conclude(
            f"{best} takes {number(1 / effects[best].value, 3)} times as many steps per second as"
            f" {known[0]}.",
            *shown,
        )
    return Finding(
        code=f"{result.record.study}.strategies",
        values=values,
        records=(result.record.id,),
        text=text,
        conclusion=conclusion,
    )


def _one(result: RankedResult[Any], name: str, values: dict[str, Value]) -> str:
    """The step of a strategy, its communication alone, and the part that lengthens the step."""
    step, alone = result.samples("step", name), result.samples("step", ALONE)
    median = result.median("step", name) or 0.0
    values[f"{name} ms"] = median
    text = f"{name} {duration(median)} per step"
    if (communication := result.median("communication", name)) is not None:
        values[f"{name} communication ms"] = communication
        text += f", {duration(communication)} of communication without overlap"
    if alone and (exposed := difference(alone, step)).value > 0:
        share = exposed.value / median
        values |= {f"{name} exposed ms": exposed.value, f"{name} exposed share": share}
        text += f", {duration(exposed.value)} ({percent(share)}) longer than without communication"
    return text
