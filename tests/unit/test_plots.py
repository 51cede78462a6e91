"""Figures as SVG: their content, unusual input, and the computation of ticks."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_page import HOSTILE, hostile_page, mfu_figure, step_figure, warmup_figure
from stepscope.report.axes import linear_ticks, log_limits, log_ticks, spread_apart
from stepscope.report.blocks import Curve, Figure, LimitLine
from stepscope.report.figure_data import data_table
from stepscope.report.names import end_names, styles
from stepscope.report.plots import svg
from stepscope.report.svg import CURVES, PAPER, inline_svg, standalone_svg

SVG = "{http://www.w3.org/2000/svg}"


def texts(drawing: str) -> list[str]:
    root = ElementTree.fromstring(drawing)
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def color_of(text: str, drawing: str) -> str | None:
    root = ElementTree.fromstring(drawing)
    matches = [element for element in root.iter(f"{SVG}text") if element.text == text]
    assert len(matches) == 1
    return matches[0].get("fill")


def figure(*curves: Curve, kind: str = "lines", **more: object) -> Figure:
    return Figure(name="f", title="T", kind=kind, curves=curves, x_label="x", y_label="y", **more)


def test_log_axes_have_plain_numbers() -> None:
    shown = texts(svg(step_figure()))
    assert {"128", "256", "512", "1,024", "2,048", "10", "20", "50", "100"} <= set(shown)
    assert "context (tokens), log scale" in shown
    assert "step (ms), log scale" in shown


def test_bars_have_a_linear_axis_from_zero() -> None:
    bars = figure(Curve(label="a", x=("one", "four"), y=(1.0, 4.0)), kind="bars", y_log=True)
    one, four = heights(svg(bars))["--curve-1"]
    assert four == pytest.approx(4 * one, rel=1e-3)
    assert not any("log scale" in text for text in texts(svg(bars)))
    named = figure(Curve(label="a", x=("p", "q"), y=(1.0, 9.0)), x_log=True, y_log=True)
    assert [text for text in texts(svg(named)) if "log scale" in text] == ["y, log scale · a"]


def test_sizes_have_binary_prefixes() -> None:
    curve = Curve(label="a", x=(1024.0, float(4 << 20), float(256 << 20)), y=(1.0, 2.0, 3.0))
    drawn = figure(curve, x_log=True, x_bytes=True)
    assert {"1.0 KiB", "4.0 MiB", "256 MiB"} <= set(texts(svg(drawn)))
    assert data_table(drawn).columns[0].kind == "bytes"


def test_curves_are_named_once() -> None:
    shown = texts(svg(step_figure()))
    assert [shown.count(name) for name in ("small", "medium", "large", "xl", "2.7b")] == [1] * 5


def test_a_name_that_would_overlap_a_curve_moves_to_the_legend() -> None:
    early = Curve(label="early", x=(1.0, 2.0), y=(1.0, 2.0))
    late = Curve(label="late", x=(1.0, 5.0), y=(1.0, 5.0))
    apart = Curve(label="late", x=(1.0, 5.0), y=(4.0, 4.0))
    assert color_of("early", svg(figure(early, late))) == "var(--ink, #1d1f24)"
    assert color_of("early", svg(figure(early, apart))) == f"var(--curve-1, {CURVES[0]})"


def test_a_limit_is_drawn_and_named() -> None:
    drawing = svg(mfu_figure())
    assert "measured bfloat16 ceiling, 792" in texts(drawing)
    assert "stroke-dasharray" in drawing


def test_colors_are_variables_and_there_are_no_inline_styles() -> None:
    for shown in (step_figure(), mfu_figure(), warmup_figure()):
        drawing = svg(shown)
        bare = re.findall(r'"(#[0-9a-f]{6})"', drawing)
        assert not bare
        assert "style" not in drawing
        assert "font-family" not in drawing
        assert f"var(--curve-1, {CURVES[0]})" in drawing


def test_the_size_follows_the_page() -> None:
    root = ElementTree.fromstring(svg(step_figure()))
    assert root.get("width") == "100%"
    assert root.get("height") is None
    assert root.get("viewBox", "").startswith("0 0 ")


def test_output_is_deterministic_and_has_no_date() -> None:
    assert svg(step_figure(), "a") == svg(step_figure(), "a")
    assert not re.search(r"20\d\d-|[Mm]atplotlib", svg(step_figure(), "a"))


def test_ids_of_two_figures_differ_and_references_resolve() -> None:
    drawings = [svg(step_figure(), "a"), svg(step_figure(), "b")]
    ids = [set(re.findall(r'\bid="([^"]+)"', drawing)) for drawing in drawings]
    assert ids[0]
    assert not ids[0] & ids[1]
    for drawing, own in zip(drawings, ids, strict=True):
        used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', drawing))
        assert {name for pair in used for name in pair if name} <= own


def test_a_figure_has_an_accessible_description() -> None:
    root = ElementTree.fromstring(svg(step_figure(), "a"))
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == "Step time against context"
    assert "small, medium" in (root.findtext(f"{SVG}desc") or "")


def test_drawing_does_not_change_the_settings_of_matplotlib() -> None:
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "path", "font.size": 31}):
        drawing = svg(step_figure(), "a")
        assert mpl.rcParams["svg.fonttype"] == "path"
        assert mpl.rcParams["font.size"] == 31
    assert drawing == svg(step_figure(), "a")


@pytest.mark.parametrize("index", [0, 1])
def test_hostile_labels_are_text(index: int) -> None:
    shown = hostile_page().sections[index].blocks[2]
    assert isinstance(shown, Figure)
    drawing = svg(shown)
    assert HOSTILE in texts(drawing)
    assert "<img" not in drawing


NAN = math.nan


@pytest.mark.parametrize("kind", ["lines", "bars"])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "curves",
    [
        (),
        (Curve(label="empty", x=(), y=()),),
        (Curve(label="one", x=(4.0,), y=(3.0,)),),
        (Curve(label="zero", x=(0.0, 1.0), y=(0.0, 0.0)),),
        (Curve(label="nan", x=(1.0, 2.0, NAN), y=(NAN, 2.0, 3.0)),),
        (Curve(label="all nan", x=(1.0,), y=(NAN,), low=(NAN,), high=(NAN,)),),
        (Curve(label="inf", x=(1.0, 2.0), y=(math.inf, 2.0), low=(1.0, -1.0), high=(3.0, NAN)),),
        (Curve(label="words", x=("a", "b"), y=(-1.0, 2.0)), Curve(label="", x=("c",), y=(1.0,))),
        (Curve(label="control \x00\x1b\n", x=("a\x00",), y=(1.0,)),),
        (Curve(label="tiny", x=(1e-12, 1e12), y=(1e-12, 1e15)),),
        tuple(Curve(label=f"c{i}", x=(1.0, 2.0), y=(i + 1.0, i + 2.0)) for i in range(12)),
        (
            Curve(
                label="long", x=tuple(map(float, range(1, 150))), y=tuple(map(float, range(1, 150)))
            ),
        ),
    ],
    ids=lambda curves: curves[0].label[:8].strip() if curves else "none",
)
def test_odd_figures_are_drawn(kind: str, log: bool, curves: tuple[Curve, ...]) -> None:
    shown = figure(
        *curves,
        kind=kind,
        x_log=log,
        y_log=log,
        marks=(LimitLine(label="m", value=NAN), LimitLine(label="n", value=2.0)),
    )
    root = ElementTree.fromstring(svg(shown))
    only_positive = log and kind == "lines"
    drawable = any(math.isfinite(y) and (y > 0 or not only_positive) for c in curves for y in c.y)
    assert ("no data" in texts(ElementTree.tostring(root, encoding="unicode"))) == (not drawable)


def test_the_font_shorthand_of_older_matplotlib_is_read() -> None:
    old = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1">'
        "<text style=\"font: bold 8.5px 'DejaVu Sans'; text-anchor: middle\">a</text></svg>"
    )
    drawing = inline_svg(old, prefix="p", title="t", description="d")
    assert '<text font-size="8.5" font-weight="bold" text-anchor="middle">a</text>' in drawing


def test_log_ticks_prefer_the_values_themselves() -> None:
    values = [128.0, 512.0, 8192.0]
    assert log_ticks(values, log_limits(values), own=True) == values


@given(
    st.floats(min_value=1e-9, max_value=1e9),
    st.floats(min_value=1.0, max_value=1e12),
    st.booleans(),
)
def test_log_ticks_are_few_and_inside(low: float, ratio: float, own: bool) -> None:
    limits = log_limits([low, low * ratio])
    ticks = log_ticks([low, low * ratio], limits, own=own)
    assert 1 <= len(ticks) <= 8
    assert ticks == sorted(ticks)
    assert all(limits[0] * 0.999 <= tick <= limits[1] * 1.001 for tick in ticks)


@given(st.floats(min_value=-1e9, max_value=1e9), st.floats(min_value=1e-3, max_value=1e9))
def test_linear_ticks_are_few_and_inside(low: float, span: float) -> None:
    ticks = linear_ticks(low, low + span)
    assert 1 <= len(ticks) <= 7
    assert ticks[0] >= low - span * 1e-3
    assert ticks[-1] <= low + span * 1.001


@given(st.lists(st.floats(min_value=0, max_value=1), min_size=1, max_size=8))
def test_names_are_spread_apart_in_order(positions: list[float]) -> None:
    moved = spread_apart(positions, 0.05)
    ordered = sorted(moved)
    assert all(b - a > 0.04 for a, b in pairwise(ordered))
    assert all(
        (a < b) <= (x < y)
        for a, x in zip(positions, moved, strict=True)
        for b, y in zip(positions, moved, strict=True)
    )


def heights(drawing: str) -> dict[str, list[float]]:
    """Heights of the bars by color, in points."""
    by_color: dict[str, list[float]] = {}
    for path in ElementTree.fromstring(drawing).iter(f"{SVG}path"):
        color = re.search(r"--curve-\d", path.get("fill", ""))
        if color and path.get("clip-path"):
            ys = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path.get("d", ""))]
            by_color.setdefault(color.group(), []).append(max(ys) - min(ys))
    return by_color


def test_stacks_are_stacked() -> None:
    drawing = svg(
        figure(
            Curve(label="matmul", x=("forward", "backward"), y=(2.0, 4.0)),
            Curve(label="softmax", x=("backward",), y=(1.0,)),
            kind="stacks",
        )
    )
    drawn = heights(drawing)
    assert [len(drawn[f"--curve-{n}"]) for n in (1, 2)] == [2, 1]
    assert drawn["--curve-1"][1] == pytest.approx(4 * drawn["--curve-2"][0], rel=1e-3)
    assert {"2.00", "5.00", "matmul", "softmax", "forward", "backward"} <= set(texts(drawing))


def test_a_standalone_drawing_needs_no_page() -> None:
    drawing = standalone_svg(svg(step_figure()))
    assert drawing == standalone_svg(svg(step_figure()))
    assert "var(" not in drawing
    assert CURVES[0] in drawing
    root = ElementTree.fromstring(drawing)
    assert root.get("font-family", "").endswith("sans-serif")
    left, top, width, height = (float(part) for part in root.attrib["viewBox"].split())
    paper = root.find(f"{SVG}rect")
    assert paper is not None
    assert paper.get("fill") == PAPER
    assert [float(paper.attrib[name]) for name in ("x", "y", "width", "height")] == [
        left,
        top,
        width,
        height,
    ]


def test_names_at_the_ends_stay_above_the_axis() -> None:
    low = [Curve(label=name, x=(1.0, 2.0), y=(0.0, 0.0)) for name in ("a", "b", "c")]
    high = Curve(label="d", x=(1.0, 2.0), y=(1.0, 1.0))
    paths = [[(0.0, y), (1.0, y)] for y in (0.0, 0.0, 0.0, 1.0)]
    positions = end_names([curve.label for curve in (*low, high)], paths)
    assert positions is not None
    assert min(height for _, height in positions) >= 0.0


def test_powers_of_two_are_their_own_ticks() -> None:
    lengths = [float(2**power) for power in range(7, 17)]
    assert log_ticks(lengths, log_limits(lengths), own=True) == lengths[::2]
    others = [100.0 + 37 * step for step in range(10)]
    assert not set(log_ticks(others, log_limits(others), own=True)) <= set(others)


def test_a_style_gives_a_curve_the_same_look_in_every_figure() -> None:
    first = Curve(label="first", x=(1.0, 2.0), y=(0.0, 0.0))
    ours = Curve(label="ours", x=(1.0, 2.0), y=(1.0, 1.0), style=4)
    for drawing in (svg(figure(first, ours)), svg(figure(ours, first))):
        assert color_of("ours", drawing) == f"var(--curve-5, {CURVES[4]})"
    for kind in ("bars", "stacks", "areas"):
        drawn = figure(first, ours, kind=kind)
        assert styles(drawn) == [0, 4]
        assert f"var(--curve-5, {CURVES[4]})" in svg(drawn)
