"""Time against memory of all plans, as a figure and for notebooks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.records.plans import Plan
from stepscope.report.blocks import Curve, Figure

_GIB = 2**30


def frontier_figure(plans: Sequence[Plan], chosen: Plan | None) -> Figure:
    """The plans, the step as it is, and the plan within a budget."""
    curves = [_curve("plans", plans), _curve("as it is", plans[:1])]
    if chosen is not None:
        curves.append(_curve("within the budget", [chosen]))
    return Figure(
        name="predicted-frontier",
        title="Time against memory",
        curves=tuple(curves),
        x_label="predicted peak, GiB",
        y_label="predicted step, ms",
    )


def _curve(label: str, plans: Sequence[Plan]) -> Curve:
    return Curve(
        label=label,
        x=tuple(plan.peak / _GIB for plan in plans),
        y=tuple(1e3 * plan.seconds for plan in plans),
    )


def frontier_html(plans: Sequence[Plan], chosen: Plan, words: str) -> str:
    """The figure with a text below, for the output of a notebook's cell."""
    from markupsafe import escape

    from stepscope.report.plots import svg
    from stepscope.report.svg import standalone_svg

    return f"{standalone_svg(svg(frontier_figure(plans, chosen)))}<pre>{escape(words)}</pre>"
