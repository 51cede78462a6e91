"""Published figures next to those measured here. Pure.

A time from another device is scaled by a ceiling: published time × rate there / rate here.
The rate here is measured; the rate there is measured for figures of Stepscope, else from the data
sheet. Bytes are the same on any device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from stepscope.measure.datasheet import datasheet_ceilings
from stepscope.model.config import ModelConfig
from stepscope.model.sizes import SIZES
from stepscope.published import Figure, figures
from stepscope.records.schema import Record
from stepscope.report.blocks import Table
from stepscope.report.format import bytes_, duration
from stepscope.report.tables import col, table
from stepscope.training.ranks.subject import RankedStep
from stepscope.training.workload import Workload

_PLAIN = {"attention": "reference", "compile": "no", "optimizer": "torch"}
# Conditions in the order of a description, with the word before each.
_WORDS = {
    "collective": "",
    "way": "",
    "size": "",
    "attention": "",
    "seq": "length",
    "head": "d",
    "heads": "heads",
    "context": "context",
    "batch": "batch",
    "ranks": "ranks",
    "dtype": "",
    "mode": "",
    "compile": "compiled by",
    "optimizer": "AdamW",
}


class Mine(NamedTuple):
    """A measured case in terms of published conditions."""

    record: Record
    conditions: Mapping[str, Any]
    values: Mapping[str, float | None]
    """Quantities in milliseconds or bytes."""
    ceiling: str | None = None
    """The ceiling that limits its times, by which other times are scaled."""


class PublishedComparison(NamedTuple):
    """A published figure and the matching case here, if all its conditions are known."""

    figure: Figure
    mine: Mine | None

    @property
    def carried(self) -> float | None:
        """The published time scaled to this device's rate."""
        if self.mine is None or self.mine.ceiling is None or self.figure.base_unit != "ms":
            return None
        if self.figure.device == self.mine.record.environment.device_name:
            return self.figure.base
        limit = self.mine.record.ceiling(self.mine.ceiling)
        there = rate_there(self.figure, self.mine.ceiling)
        return None if limit is None or there is None else self.figure.base * there / limit.value

    @property
    def here(self) -> float | None:
        return None if self.mine is None else self.mine.values[self.figure.quantity]

    @property
    def ratio(self) -> float | None:
        """Measured value over the published one, which is scaled if it is a time."""
        against = self.carried if self.figure.base_unit == "ms" else self.figure.base
        if self.here is None or not against or self.figure.doubt:
            return None
        return self.here / against


def rate_there(figure: Figure, ceiling: str) -> float | None:
    if ceiling in figure.rates:
        return figure.rates[ceiling]
    sheet = datasheet_ceilings(figure.rates_of)
    return next((entry.value for entry in sheet if entry.name == ceiling), None)


def size_name(model: ModelConfig) -> str | None:
    """The 2025 name of a shape from any size table; None for any other shape."""
    for name, known in SIZES["2025"].items():
        if msgspec.structs.replace(known, context=model.context) == model:
            return name
    return None


def step_conditions(work: Workload) -> dict[str, Any] | None:
    """A training step in terms of published conditions; None if they cannot express it."""
    for field in msgspec.structs.fields(Workload):
        if field.default is not msgspec.NODEFAULT and getattr(work, field.name) != field.default:
            return None
    name = size_name(work.model())
    return None if name is None else msgspec.structs.asdict(work) | {"size": name}


def ranked_step(record: Record, case: RankedStep, way: str, step_ms: float | None) -> Mine:
    """A step on several ranks; its time is not scaled, because links differ too much."""
    shape = case.shape
    conditions = {
        "context": case.context,
        "batch": case.batch,
        "ranks": case.ranks,
        "way": way,
        "size": case.size if shape is None else size_name(shape),
    }
    return Mine(record, conditions, {"step": step_ms})


def matched_figures(study: str, mine: Sequence[Mine]) -> list[PublishedComparison]:
    """Each figure with its matching cases; without any match, figures with unstated conditions."""
    matched, alone = [], []
    for figure in figures(study):
        fitting = [
            case
            for case in mine
            if case.record.run not in figure.runs
            and case.values.get(figure.quantity) is not None
            and figure.conditions.items() <= case.conditions.items()
        ]
        open_ = [name for name in figure.unstated if name != "device"]
        if fitting and open_:
            alone.append(PublishedComparison(figure, None))
        else:
            matched += [PublishedComparison(figure, case) for case in fitting]
    return matched or alone


def published_tables(study: str, mine: Sequence[Mine]) -> Iterator[Table]:
    pairs = matched_figures(study, mine)
    if not pairs:
        return
    yield table(
        f"{study}-published",
        "Published figures next to these",
        pairs,
        [
            col("source", lambda pair: _source(pair.figure)),
            col("case", lambda pair: _case(pair.figure)),
            col("what", lambda pair: f"{pair.figure.quantity}, {pair.figure.statistic}"),
            col("published", _published),
            col(
                "scaled",
                lambda pair: _shown(pair.figure, pair.carried),
                hint="published time × matmul rate (or bandwidth) there / rate measured here",
            ),
            col("here", lambda pair: _shown(pair.figure, pair.here)),
            col(
                "here / published",
                lambda pair: pair.ratio,
                "number",
                hint="relative to the scaled time; bytes unscaled",
            ),
            col("note", lambda pair: _note(pair.figure)),
        ],
        caption="A figure matches a case if every condition that it states is the same."
        f" {_how(mine)} A figure that leaves a condition open, or is known to be wrong, has no"
        " ratio.",
        details=lambda pair: f"{pair.figure.writeup}\n{pair.figure.table}",
    )


def _how(mine: Sequence[Mine]) -> str:
    names = sorted({case.ceiling for case in mine if case.ceiling})
    if not names:
        return "No figure is scaled from another device here."
    return (
        f"Times of another device are scaled by {', '.join(names)}: the rate of its data"
        " sheet (for Stepscope's own records: the measured rate) over the rate measured here. This"
        " assumes that both devices reach the same share of it; a step that the CPU limits does"
        " not."
    )


def _shown(figure: Figure, value: float | None, digits: int = 4) -> str | None:
    show = duration if figure.base_unit == "ms" else bytes_
    return None if value is None else show(value, digits)


def _published(pair: PublishedComparison) -> str:
    figure = pair.figure
    published = str(_shown(figure, figure.base))
    if figure.spread is not None:
        published += f" ± {_shown(figure, figure.spread * figure.base / figure.value, 2)}"
    return published


def _source(figure: Figure) -> str:
    """The write-up, and the device if that is not part of its name."""
    short = figure.device.removeprefix("NVIDIA ").removeprefix("GeForce ")
    return figure.writeup if short in figure.writeup else f"{figure.writeup}, {short}"


def _case(figure: Figure) -> str:
    """The conditions as a phrase; default values are left out."""
    words = []
    for name, word in _WORDS.items():
        value = figure.conditions.get(name)
        if value is None or _PLAIN.get(name) == value:
            continue
        shown = bytes_(value) if name == "size" and isinstance(value, int) else value
        words.append(f"{word} {shown}".strip())
    return ", ".join(words)


def _note(figure: Figure) -> str:
    parts = [figure.doubt, figure.note]
    if figure.unstated:
        parts.append(f"not stated: {', '.join(figure.unstated)}")
    if figure.assumed:
        parts.append(f"as the assignment sets it: {', '.join(figure.assumed)}")
    return "; ".join(filter(None, parts))
