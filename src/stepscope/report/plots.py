"""Draw a figure as inline SVG with matplotlib's object interface.

The colors are those of `svg.py`, which maps them to CSS variables. Every curve has a distinct
marker besides its color, and its name at its end if it fits, otherwise in a legend. Margins are
computed here: matplotlib's layout engine would draw everything twice.
"""

from __future__ import annotations

import io
import math
import warnings
from typing import TYPE_CHECKING, Any

from stepscope.report import names
from stepscope.report.areas import Floors, Point, draw_areas, draw_spans
from stepscope.report.axes import linear_limits, linear_ticks, log_limits, log_ticks
from stepscope.report.blocks import Curve, Figure
from stepscope.report.figure_data import categories
from stepscope.report.format import bytes_, number, tick
from stepscope.report.names import FONT_SIZE, MARKERS, PLAIN, clean
from stepscope.report.svg import CURVES, GRID, INK, MARK, PAPER, SOFT, inline_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 446.0, 238.0
"""Size in points, the units of the drawing."""

_DPI = 180
_LONGEST_SINGLE_NAME = 48
_MAX_MARKERS = 32
_MAX_BAR_NUMBERS = 12
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "stepscope",
    "font.family": ["DejaVu Sans"],
    "font.size": FONT_SIZE,
}


def svg(figure: Figure, prefix: str = "figure") -> str:
    """Draw the figure; `prefix` must be unique among the figures of the page."""
    out = io.StringIO()
    _save(figure, out, format="svg", transparent=True, metadata={"Date": None})
    labels = ", ".join(clean(curve.label) for curve in figure.curves)
    text = f"{clean(figure.y_label)} against {clean(figure.x_label)}: {labels}"
    return inline_svg(out.getvalue(), prefix=prefix, title=clean(figure.title), description=text)


def png(figure: Figure) -> bytes:
    """The figure as an image file, on paper."""
    out = io.BytesIO()
    _save(figure, out, format="png", dpi=_DPI, facecolor=PAPER, metadata={"Software": None})
    return out.getvalue()


def _save(figure: Figure, out: io.StringIO | io.BytesIO, **options: Any) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context(), warnings.catch_warnings():
        # A glyph that is missing in matplotlib's font is drawn with the browser's font.
        warnings.simplefilter("ignore", UserWarning)
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)
        canvas = Canvas(figsize=(WIDTH / 72, HEIGHT / 72))
        _draw(canvas.add_axes((0, 0, 1, 1)), figure)
        canvas.savefig(out, **options)


def _draw(axes: Axes, figure: Figure) -> None:
    keys = categories(figure)
    named = figure.kind in ("bars", "stacks") or any(isinstance(key, str) for key in keys)
    positions = {key: float(index if named else key) for index, key in enumerate(keys)}
    log_x = figure.x_log and not named
    log_y = _log_y(figure)
    curves = [_points(curve, positions, log_x=log_x, log_y=log_y) for curve in figure.curves]
    floors = _floors(curves) if figure.kind in ("stacks", "areas") else {}
    if not any(curves):
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no data", color=SOFT, ha="center")
        return
    labels, common = names.distinct([curve.label for curve in figure.curves])
    y_ticks = _scale_y(axes, figure, [_tops(curves, floors)] if floors else curves)
    left, right, bottom, top = names.width_of(y_ticks) + 8, 4.0, 28.0, 22.0
    if named:
        below, beyond = names.name_categories(axes, keys, WIDTH - left - right)
        bottom, left = bottom + below - FONT_SIZE, max(left, beyond)
    else:
        _scale_x(axes, figure, curves)
    single = len(labels) == 1
    ends = None
    styles = names.styles(figure)
    if figure.kind == "lines":
        _lines(axes, curves, styles)
        ends = None if single else names.end_names(labels, _paths(axes, curves))
    elif figure.kind == "bars":
        _bars(axes, curves, styles)
    elif figure.kind == "stacks":
        _stacks(axes, curves, floors, styles)
    else:
        draw_areas(axes, curves, floors, styles)
    title = _axis_name(figure.y_label, log=log_y)
    if single and labels[0]:
        title += f" · {clean(figure.curves[0].label, _LONGEST_SINGLE_NAME)}"
    if common:
        title += f" · {common}"
    if ends:
        names.draw_end_names(axes, figure, labels, ends)
        right = names.room_right(labels, ends, WIDTH - left)
    elif not single:
        beside = WIDTH - names.width_of([title]) - 30
        columns = names.legend_columns(labels, beside)
        if columns < len(labels):
            columns = names.legend_columns(labels, WIDTH - left)
            top += math.ceil(len(labels) / columns) * names.LEGEND_ROW
        names.draw_legend(axes, figure, labels, columns, top - 6)
    draw_spans(axes, figure.spans)
    _marks(axes, figure)
    _style_axes(axes, _axis_name(figure.x_label, log=log_x), title, left)
    axes.set_position(
        (left / WIDTH, bottom / HEIGHT, 1 - (left + right) / WIDTH, 1 - (top + bottom) / HEIGHT)
    )


def _log_y(figure: Figure) -> bool:
    return figure.y_log and figure.kind == "lines"


def _axis_name(label: str, *, log: bool) -> str:
    return f"{clean(label)}, log scale" if log else clean(label)


def _points(
    curve: Curve, positions: dict[float | str, float], *, log_x: bool, log_y: bool
) -> list[Point]:
    """The points that can be drawn: finite, and positive on a logarithmic axis."""
    keys: list[float | str] = list(curve.x)
    lows = curve.low if curve.low and curve.high else curve.y
    highs = curve.high if curve.low and curve.high else curve.y
    points = []
    for key, y, low, high in zip(keys, curve.y, lows, highs, strict=True):
        x = positions[key]
        if not (math.isfinite(x) and math.isfinite(y)) or (log_x and x <= 0) or (log_y and y <= 0):
            continue
        below = max(0.0, y - low) if math.isfinite(low) else 0.0
        above = max(0.0, high - y) if math.isfinite(high) else 0.0
        points.append(Point(x, y, min(below, y * 0.99) if log_y else below, above))
    return sorted(points)


def _scale_y(axes: Axes, figure: Figure, curves: list[list[Point]]) -> list[str]:
    extremes = [y for points in curves for p in points for y in (p.y - p.below, p.y + p.above)]
    extremes += [mark.value for mark in figure.marks if math.isfinite(mark.value)]
    if _log_y(figure):
        extremes = [value for value in extremes if value > 0]
        limits = log_limits(extremes)
        ticks = log_ticks(extremes, limits, own=False)
        axes.set_yscale("log")
    else:
        limits = linear_limits(extremes, from_zero=figure.kind != "lines")
        ticks = linear_ticks(*limits)
    texts = [tick(value) for value in ticks]
    axes.set_ylim(*limits)
    axes.set_yticks([], minor=True)
    axes.set_yticks(ticks, texts)
    return texts


def _scale_x(axes: Axes, figure: Figure, curves: list[list[Point]]) -> None:
    values = [point.x for points in curves for point in points]
    if figure.x_log:
        limits = log_limits(values)
        ticks = log_ticks(values, limits, own=True)
        axes.set_xscale("log")
    else:
        low, high = min(values), max(values)
        margin = (high - low) * 0.03 or 0.5
        limits = (low - margin, high + margin)
        ticks = [value for value in linear_ticks(*limits, most=8) if low <= value <= high]
        if all(value.is_integer() for value in values):
            ticks = [value for value in ticks if float(value).is_integer()]
    axes.set_xlim(*limits)
    axes.set_xticks([], minor=True)
    texts = [bytes_(value, 2) if figure.x_bytes else tick(value) for value in ticks]
    axes.set_xticks(ticks, texts)


def _paths(axes: Axes, curves: list[list[Point]]) -> list[names.Path]:
    to_axes = axes.transScale + axes.transLimits
    return [
        to_axes.transform([(p.x, p.y) for p in points]).tolist() if points else []
        for points in curves
    ]


def _lines(axes: Axes, curves: list[list[Point]], styles: list[int]) -> None:
    for style, points in zip(styles, curves, strict=True):
        if not points:
            continue
        axes.errorbar(
            [p.x for p in points],
            [p.y for p in points],
            yerr=_error_bars(points),
            color=CURVES[style % len(CURVES)],
            linewidth=1.5,
            elinewidth=0.9,
            marker=MARKERS[style % len(MARKERS)] if len(points) <= _MAX_MARKERS else "",
            markersize=5.2,
            markeredgecolor=PAPER,
            markeredgewidth=0.6,
            linestyle="-" if style < len(CURVES) else "--",
            zorder=3,
        )


def _bars(axes: Axes, curves: list[list[Point]], styles: list[int]) -> None:
    width = 0.76 / len(curves)
    if any(p.y < 0 for points in curves for p in points):
        axes.axhline(0, color=SOFT, linewidth=0.6)
    with_numbers = sum(len(points) for points in curves) <= _MAX_BAR_NUMBERS
    for index, (style, points) in enumerate(zip(styles, curves, strict=True)):
        shift = (index - (len(curves) - 1) / 2) * width
        axes.bar(
            [p.x + shift for p in points],
            [p.y for p in points],
            width=min(width, 0.5) * 0.92,
            yerr=_error_bars(points),
            color=CURVES[style % len(CURVES)],
            error_kw={"ecolor": INK, "elinewidth": 0.9},
            zorder=2,
        )
        for p in points if with_numbers else []:
            up = p.y >= 0
            axes.annotate(
                number(float(p.y), 3),
                (p.x + shift, p.y + p.above if up else p.y - p.below),
                xytext=(0, 3 if up else -3),
                textcoords="offset points",
                ha="center",
                va="bottom" if up else "top",
                color=INK,
                fontsize=FONT_SIZE - 1,
            )


def _floors(curves: list[list[Point]]) -> Floors:
    floors: Floors = {}
    heights: dict[float, float] = {}
    for index, points in enumerate(curves):
        for p in points:
            floors[index, p.x] = heights.get(p.x, 0.0)
            heights[p.x] = floors[index, p.x] + max(0.0, p.y)
    return floors


def _tops(curves: list[list[Point]], floors: Floors) -> list[Point]:
    return [
        Point(p.x, floors[index, p.x] + max(0.0, p.y), 0.0, 0.0)
        for index, points in enumerate(curves)
        for p in points
    ]


def _stacks(axes: Axes, curves: list[list[Point]], floors: Floors, styles: list[int]) -> None:
    for index, (style, points) in enumerate(zip(styles, curves, strict=True)):
        axes.bar(
            [p.x for p in points],
            [max(0.0, p.y) for p in points],
            width=0.5,
            bottom=[floors[index, p.x] for p in points],
            color=CURVES[style % len(CURVES)],
            edgecolor=PAPER,
            linewidth=0.3,
            hatch=names.hatch(style),
            zorder=2,
        )
    tops: dict[float, float] = {}
    for p in _tops(curves, floors):
        tops[p.x] = max(tops.get(p.x, 0.0), p.y)
    for x, top in tops.items() if len(tops) <= _MAX_BAR_NUMBERS else ():
        axes.annotate(
            number(float(top), 3),
            (x, top),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=INK,
            fontsize=FONT_SIZE - 1,
        )


def _error_bars(points: list[Point]) -> list[list[float]] | None:
    if not any(p.below or p.above for p in points):
        return None
    return [[p.below for p in points], [p.above for p in points]]


def _marks(axes: Axes, figure: Figure) -> None:
    marks = [mark for mark in figure.marks if math.isfinite(mark.value)]
    for index, mark in enumerate(marks):
        if _log_y(figure) and mark.value <= 0:
            continue
        axes.axhline(mark.value, color=MARK, linewidth=1.0, linestyle=(0, (5, 3)), zorder=1)
        # Neighboring limits have their names at opposite ends, so that the names do not overlap.
        right = index % 2 == 0
        axes.annotate(
            f"{clean(mark.label, 60)}, {number(float(mark.value), 3)}",
            (1 if right else 0, mark.value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 6),
            textcoords="offset points",
            ha="right" if right else "left",
            color=MARK,
            fontsize=FONT_SIZE - 0.5,
            bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 1},
            zorder=4,
            **PLAIN,
        )


def _style_axes(axes: Axes, x_title: str, title: str, left: float) -> None:
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)
    axes.spines["bottom"].set_linewidth(0.6)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=5, labelcolor=SOFT)
    axes.set_xlabel(x_title, color=SOFT, labelpad=5, **PLAIN)
    axes.annotate(
        title,
        (0, 1),
        xycoords="axes fraction",
        xytext=(-left, 10),
        textcoords="offset points",
        color=SOFT,
        **PLAIN,
    )
