"""Parts of figures that several views draw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from stepscope.report.blocks import Curve, Lane, LaneSpan
from stepscope.report.format import duration, percent

X = TypeVar("X", str, float)


def curves(values: Mapping[str, Mapping[X, float]]) -> tuple[Curve, ...]:
    """A curve for each label, from its values by x."""
    return tuple(
        Curve(label=label, x=tuple(by_x), y=tuple(by_x.values())) for label, by_x in values.items()
    )


def lane(label: str, spans: Iterable[tuple[float, float, str, str]]) -> Lane:
    """A lane of a timeline from start, end, label and group of its spans."""
    return Lane(
        label=label,
        spans=tuple(
            LaneSpan(start=start, end=end, label=text, group=group)
            for start, end, text, group in spans
        ),
    )


def bar(label: str, start: float, ms: float, total_ms: float, group: str) -> Lane:
    """A lane with one bar, labeled with its time and its share of the total."""
    text = f"{duration(ms)}, {percent(ms / total_ms)}"
    return lane(label, [(start, start + ms, text, group)])
