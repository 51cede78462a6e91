"""Stacked areas over a numeric axis, and named spans of that axis."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from stepscope.report.blocks import Span
from stepscope.report.names import FONT_SIZE, LETTER, PLAIN, hatch, short
from stepscope.report.svg import CURVES, PAPER, SOFT

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Point(NamedTuple):
    x: float
    y: float
    below: float
    above: float


Floors = dict[tuple[int, float], float]
"""Lower edge of a curve in the stack, by curve index and x."""


def draw_areas(
    axes: Axes, curves: list[list[Point]], floors: Floors, styles: Sequence[int]
) -> None:
    for index, (style, points) in enumerate(zip(styles, curves, strict=True)):
        bottoms = [floors[index, p.x] for p in points]
        axes.fill_between(
            [p.x for p in points],
            bottoms,
            [bottom + max(0.0, p.y) for bottom, p in zip(bottoms, points, strict=True)],
            facecolor=CURVES[style % len(CURVES)],
            edgecolor=PAPER,
            linewidth=0.2,
            hatch=hatch(style),
            zorder=2,
        )


def draw_spans(axes: Axes, spans: Sequence[Span]) -> None:
    """Draw a line at the start of each span, and its name if it fits."""
    if not spans:
        return
    low, high = axes.get_xlim()
    for span, following in pairwise((*spans, Span(label="", start=high))):
        axes.axvline(span.start, color=SOFT, linewidth=0.6, linestyle=(0, (2, 2)), zorder=3)
        width = (following.start - span.start) / (high - low) * _WIDTH
        if width >= LETTER * len(short(span.label)):
            axes.annotate(
                short(span.label),
                (span.start, 1),
                xycoords=("data", "axes fraction"),
                xytext=(2, -1),
                textcoords="offset points",
                va="top",
                color=SOFT,
                fontsize=FONT_SIZE - 0.5,
                zorder=4,
                **PLAIN,
            )


_WIDTH = 380.0
"""Approximate width of the axes in points."""
