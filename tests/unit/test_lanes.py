"""Timelines as SVG: positions and names of intervals, and unusual input."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from sample_page import HOSTILE
from stepscope.report.blocks import Lane, LaneSpan, Page, Section, Table, Timeline
from stepscope.report.html import html_page
from stepscope.report.lanes import WIDTH, lanes_svg
from stepscope.report.svg import CURVES
from stepscope.report.text import markdown_page

SVG = "{http://www.w3.org/2000/svg}"


def span(start: float, end: float, label: str = "k", group: str = "matmul") -> LaneSpan:
    return LaneSpan(start=start, end=end, label=label, group=group)


def timeline(*lanes: Lane) -> Timeline:
    return Timeline(name="t", title="One step", lanes=lanes, x_label="ms", caption="Seen once.")


STEP = timeline(
    Lane(label="host", spans=(span(0, 5, "forward"), span(5, 10, "back")), look="named"),
    Lane(label="device", spans=(span(1, 5), span(6, 10, "s", "softmax"))),
    Lane(label="idle", spans=(span(5, 6, "host", "host"),), look="gaps"),
)


def boxes(drawing: str) -> list[tuple[str, float, float, str]]:
    """Tooltip, left edge, width and fill of every interval."""
    drawn = []
    for group in ElementTree.fromstring(drawing).iter(f"{SVG}g"):
        box, tip = group.find(f"{SVG}rect"), group.find(f"{SVG}title")
        assert box is not None
        assert tip is not None
        drawn.append(
            (
                tip.text or "",
                float(box.get("x", "")),
                float(box.get("width", "")),
                box.get("fill", ""),
            )
        )
    return drawn


def test_a_group_with_a_style_has_that_color() -> None:
    late = LaneSpan(start=1, end=2, label="s", group="softmax", style=2)
    other = LaneSpan(start=2, end=3, label="o", group="other", style=8)
    fills = [box[3] for box in boxes(lanes_svg(timeline(Lane(label="d", spans=(late, other)))))]
    assert fills == [f"var(--curve-{n}, {CURVES[n - 1]})" for n in (3, 9)]


def texts(drawing: str) -> list[str]:
    return [t.text or "" for t in ElementTree.fromstring(drawing).iter(f"{SVG}text")]


def test_intervals_are_drawn_at_their_times() -> None:
    drawn = {tip: (left, wide) for tip, left, wide, _ in boxes(lanes_svg(STEP))}
    origin, total = drawn["forward: 5.00 ms"][0], 2 * drawn["forward: 5.00 ms"][1]
    assert drawn["k: 4.00 ms"] == pytest.approx((origin + total / 10, total * 0.4), abs=0.02)
    assert drawn["host: 1.00 ms"] == pytest.approx((origin + total / 2, total * 0.1), abs=0.02)
    assert origin + total < WIDTH


def test_groups_have_colors_and_a_legend() -> None:
    drawing = lanes_svg(STEP)
    fills = {tip.split(":")[0]: fill for tip, _, _, fill in boxes(drawing)}
    assert len({fills["k"], fills["s"], fills["host"], fills["forward"]}) == 4
    assert all(fill.startswith("var(--") for fill in fills.values())
    shown = texts(drawing)
    assert {"matmul", "softmax", "idle: host", "device", "host", "idle"} <= set(shown)
    assert {"forward", "back"} <= set(shown)
    assert {"0", "2", "10", "ms"} <= set(shown)


def test_a_name_that_does_not_fit_is_only_in_the_tooltip() -> None:
    drawing = lanes_svg(
        timeline(
            Lane(
                label="d",
                spans=(span(0, 100, "wide enough"), span(100, 100.5, "too narrow for this")),
            )
        )
    )
    assert "wide enough" in texts(drawing)
    assert not [text for text in texts(drawing) if text.startswith("too")]
    assert "too narrow for this: 0.500 ms" in [tip for tip, *_ in boxes(drawing)]


def test_a_single_interval_has_its_name_next_to_it_if_there_is_space() -> None:
    early, late = span(0, 0.5, "early and short"), span(99.5, 100, "late and short")
    drawing = lanes_svg(
        timeline(
            Lane(label="a", spans=(span(0, 100, "all of it"),)),
            Lane(label="b", spans=(early,)),
            Lane(label="c", spans=(late,)),
            Lane(label="d", spans=(span(0, 100, "far too long for any lane " * 5),)),
        )
    )
    anchors = {
        text.text: text.get("text-anchor")
        for text in ElementTree.fromstring(drawing).iter(f"{SVG}text")
    }
    assert anchors["all of it"] == "middle"
    assert anchors["early and short"] == "start"
    assert anchors["late and short"] == "end"
    assert [text for text in anchors if text and text.startswith("far") and text.endswith("…")]


@pytest.mark.parametrize(
    "lanes",
    [
        (),
        (Lane(label="empty", spans=()),),
        (Lane(label="nothing", spans=(span(3, 3),)),),
        (Lane(label="odd", spans=(span(math.nan, 3), span(0, math.inf))),),
    ],
)
def test_a_timeline_without_data(lanes: tuple[Lane, ...]) -> None:
    assert texts(lanes_svg(timeline(*lanes))) == ["no data"]


@pytest.mark.parametrize("text", [HOSTILE, "\x00\x1b[31m\ud7ff", "</title><script>"])
def test_hostile_names_are_text(text: str) -> None:
    lane = Lane(label=text, spans=(span(0, 10, text, text),))
    drawing = lanes_svg(timeline(lane))
    assert "<script" not in drawing
    assert len(boxes(drawing)) == 1


def test_a_page_with_timelines() -> None:
    page = Page(
        title="P",
        subtitle="",
        headline=Table(name="h", title="H", columns=(), rows=()),
        sections=(Section(name="s", title="S", question="?", blocks=(STEP, STEP)),),
    )
    html = html_page(page)
    assert html.count("One step</strong>") == 2
    assert html.count('id="t-svg-title"') == html.count('id="t-2-svg-title"') == 1
    assert "*Figure, not shown here: One step*: Seen once." in markdown_page(page)
