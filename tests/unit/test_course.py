"""Memory over the course of a step: few points, and every peak is preserved."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stepscope.measure.memory_timeline import MemoryTimeline
from stepscope.report.blocks import Curve, Figure, LimitLine, Span
from stepscope.report.plots import svg

SIZES = st.binary(min_size=1, max_size=300)


@given(st.lists(SIZES, min_size=1, max_size=4))
def test_points_are_bounded_and_preserve_the_peak_of_each_phase(phases: list[bytes]) -> None:
    course = MemoryTimeline(most=16)
    for number, sizes in enumerate(phases):
        for size in sizes:
            course.add(f"phase {number}", {"a": size, "b": 1})
    points = course.points()
    assert len(points) <= 16 + len(phases)
    assert [p.operator for p in points] == sorted({p.operator for p in points})
    for number, sizes in enumerate(phases):
        totals = [sum(p.kinds.values()) for p in points if p.phase == f"phase {number}"]
        assert max(totals) == max(sizes) + 1


def test_a_short_step_keeps_every_point() -> None:
    course = MemoryTimeline(most=16)
    for size in (3, 5, 0):
        course.add("forward", {"a": size})
    assert [(p.operator, p.kinds) for p in course.points()] == [
        (1, {"a": 3}),
        (2, {"a": 5}),
        (3, {}),
    ]


def test_areas_are_drawn_with_their_spans_and_the_peak() -> None:
    drawn = svg(
        Figure(
            name="course",
            title="Memory",
            kind="areas",
            x_label="operators run",
            y_label="MiB",
            curves=(
                Curve(label="weights", x=(1.0, 50.0, 100.0), y=(2.0, 2.0, 2.0)),
                Curve(label="saved", x=(1.0, 50.0, 100.0), y=(0.0, 3.0, 0.0)),
            ),
            marks=(LimitLine(label="peak", value=5.0),),
            spans=(Span(label="forward", start=1.0), Span(label="backward", start=50.0)),
        )
    )
    for word in ("forward", "backward", "weights", "saved", "peak, 5"):
        assert word in drawn
    assert "no data" not in drawn
