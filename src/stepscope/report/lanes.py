"""Draw a timeline as inline SVG: lanes from top to bottom, the time axis below.

Every interval has a tooltip with its name and length. An interval that is wide enough shows its
name inside; one that is alone in its lane shows it next to itself. Widths are estimated from the
number of letters, as in `names.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from stepscope.report.axes import linear_ticks
from stepscope.report.blocks import Lane, LaneSpan, Timeline
from stepscope.report.format import number, tick
from stepscope.report.names import FONT_SIZE, LEGEND_ROW, LETTER, clean, short, width_of
from stepscope.report.svg import (
    CURVES,
    GRID,
    IDLE,
    INK,
    LEGEND,
    PAPER,
    SOFT,
    color_numbers,
    inline_svg,
)

WIDTH = 600.0
_LANE, _GAP, _AXIS, _KEY = 18.0, 6.0, 30.0, 10.0
_RIGHT = 8.0
_LONGEST_LANE_NAME = 40
_GAP_COLORS = (CURVES[IDLE], SOFT, GRID)


def only_meanings(timeline: Timeline) -> bool:
    """True if the legend of a page has every color of the timeline."""
    groups = {s.group for lane in timeline.lanes if lane.look == "grouped" for s in lane.spans}
    return groups <= set(LEGEND) and all(lane.look != "gaps" for lane in timeline.lanes)


def lanes_svg(timeline: Timeline, prefix: str = "timeline", *, legend: bool = True) -> str:
    """Draw the timeline; `prefix` must be unique among the drawings of the page."""
    lanes = [_drawable(lane) for lane in timeline.lanes]
    lanes = [lane for lane in lanes if lane.spans]
    colors = _colors(lanes)
    left = width_of([_lane_name(lane) for lane in lanes]) + 10
    legend_rows, keys = _legend(colors, left) if legend else (0, [])
    top = legend_rows * LEGEND_ROW + (4 if legend_rows else 0)
    height = top + len(lanes) * (_LANE + _GAP) + _AXIS
    root = Element("svg", {"viewBox": f"0 0 {WIDTH:g} {height:g}"})
    root.extend(keys)
    ends = [span for lane in lanes for span in lane.spans]
    if ends:
        first, last = min(0.0, *(s.start for s in ends)), max(s.end for s in ends)
        scale = (WIDTH - left - _RIGHT) / (last - first)
        bottom = height - _AXIS
        root.extend(_axis(timeline.x_label, first, last, left, scale, top, bottom))
        for index, lane in enumerate(lanes):
            y = top + index * (_LANE + _GAP)
            root.append(_text(_lane_name(lane), left - 8, y + _LANE / 2, SOFT, "end"))
            for span in lane.spans:
                x = left + (span.start - first) * scale
                wide = (span.end - span.start) * scale
                box = _box(lane, span, x, y, wide, colors, timeline.x_label)
                box.extend(_name(lane, span, x, y, wide, left, colors))
                root.append(box)
    else:
        root.append(_text("no data", WIDTH / 2, height / 2, SOFT, "middle"))
    drawing = ElementTree.tostring(root, encoding="unicode")
    listed = ", ".join(clean(lane.label) for lane in lanes)
    return inline_svg(
        drawing,
        prefix=prefix,
        title=clean(timeline.title),
        description=f"{clean(timeline.x_label)} of: {listed}",
    )


def _lane_name(lane: Lane) -> str:
    return clean(lane.label, _LONGEST_LANE_NAME)


def _drawable(lane: Lane) -> Lane:
    """Remove the intervals that are empty or not finite."""
    drawable = tuple(
        s for s in lane.spans if math.isfinite(s.start) and math.isfinite(s.end) and s.end > s.start
    )
    return Lane(label=lane.label, spans=drawable, look=lane.look)


def _colors(lanes: list[Lane]) -> dict[tuple[str, str], str]:
    """Color of every group: by its style, its meaning, or its index among the groups."""
    colors: dict[tuple[str, str], str] = {}
    for look, palette in (("grouped", CURVES), ("gaps", _GAP_COLORS)):
        groups = {
            span.group: span.style for lane in lanes if lane.look == look for span in lane.spans
        }
        numbers = color_numbers(list(groups), list(groups.values()))
        if look == "gaps":
            numbers = list(range(len(groups)))
        for group, color in zip(groups, numbers, strict=True):
            colors[look, group] = palette[color % len(palette)]
    return colors


def _legend(colors: dict[tuple[str, str], str], left: float) -> tuple[int, list[Element]]:
    elements: list[Element] = []
    x, rows = left, 1 if colors else 0
    for (look, group), color in colors.items():
        text = short(group) if look == "grouped" else f"idle: {short(group)}"
        needed = _KEY + 6 + width_of([text]) + 12
        if x > left and x + needed > WIDTH:
            x, rows = left, rows + 1
        y = (rows - 1) * LEGEND_ROW
        elements.append(_rectangle(x, y + 2, _KEY, _KEY, color))
        elements.append(_text(text, x + _KEY + 5, y + 2 + _KEY / 2, INK))
        x += needed
    return rows, elements


def _axis(
    label: str, first: float, last: float, left: float, scale: float, top: float, bottom: float
) -> Iterator[Element]:
    for value in linear_ticks(first, last, most=10):
        x = left + (value - first) * scale
        line = {
            "x1": f"{x:.2f}",
            "x2": f"{x:.2f}",
            "y1": f"{top:g}",
            "y2": f"{bottom:g}",
            "stroke": GRID,
            "stroke-width": "0.7",
        }
        yield Element("line", line)
        yield _text(tick(value), x, bottom + 8, SOFT, "middle")
    yield _text(clean(label), (left + WIDTH) / 2, bottom + 22, SOFT, "middle")


def _box(
    lane: Lane,
    span: LaneSpan,
    x: float,
    y: float,
    wide: float,
    colors: dict[tuple[str, str], str],
    unit: str,
) -> Element:
    named = lane.look == "named"
    color = PAPER if named else colors[lane.look, span.group]
    group = Element("g")
    box = _rectangle(x, y, max(wide, 0.4), _LANE, color)
    if named:
        box.attrib.update({"stroke": SOFT, "stroke-width": "0.7"})
    group.append(box)
    tip = Element("title")
    length = number(float(span.end - span.start), 3)
    tip.text = f"{clean(span.label)}: {length} {clean(unit)}"
    group.append(tip)
    return group


def _name(
    lane: Lane,
    span: LaneSpan,
    x: float,
    y: float,
    wide: float,
    left: float,
    colors: dict[tuple[str, str], str],
) -> Iterator[Element]:
    """The name inside its box; next to it if it does not fit and the lane is free; else cut."""
    text, middle = clean(span.label), y + _LANE / 2
    letters, needed = int((wide - 4) / LETTER), width_of([text])
    if len(text) > letters and len(lane.spans) == 1 and lane.look == "grouped":
        if x + wide + 4 + needed <= WIDTH:
            yield _text(text, x + wide + 4, middle, INK)
            return
        if x - 4 - needed >= left:
            yield _text(text, x - 4, middle, INK, "end")
            return
    if letters >= min(len(text), 5) and text:
        light = lane.look != "named" and colors[lane.look, span.group] != GRID
        fitting = text if len(text) <= letters else f"{text[: letters - 1]}…"
        yield _text(fitting, x + wide / 2, middle, PAPER if light else INK, "middle")


def _rectangle(x: float, y: float, wide: float, high: float, color: str) -> Element:
    size = {"x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{wide:.2f}", "height": f"{high:.2f}"}
    return Element("rect", size | {"fill": color})


def _text(text: str, x: float, y: float, color: str, anchor: str = "start") -> Element:
    # The middle of lowercase letters is a third of the font size above the baseline.
    position = {"x": f"{x:.2f}", "y": f"{y + FONT_SIZE * 0.34:.2f}", "font-size": f"{FONT_SIZE:g}"}
    element = Element("text", position | {"fill": color, "text-anchor": anchor})
    element.text = text
    return element
