"""The missed goals in docs/limits.md, generated from the records: the lines between two comments
in it."""

from __future__ import annotations

import sys
from pathlib import Path

from page_parts import replaced

from stepscope.report.blocks import Cell, Interval
from stepscope.report.tables import col, table
from stepscope.report.text import markdown

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from goals import NOT_MEASURED, REACHED, Judged, judge, read_evidence, read_goals  # noqa: E402

BEGIN = "<!-- goals: made by scripts/make_docs.py -->"


def with_goals(page: str, results: Path) -> str:
    """Return the page with the lines between the comments regenerated."""
    return replaced(page, BEGIN, _goals(results))


def _goals(results: Path) -> str:
    judged = judge(read_goals(), read_evidence(sorted(results.glob("*.jsonl"))))
    short = [one for one in judged if one.outcome not in (REACHED, NOT_MEASURED)]
    reached = sum(one.outcome == REACHED for one in judged)
    measured = sum(one.outcome != NOT_MEASURED for one in judged)
    missed = table(
        "goals",
        "",
        short,
        [
            col("outcome", lambda one: f"{one.outcome}{' (aim)' if one.goal.aim else ''}"),
            col("measure", lambda one: one.goal.measure),
            col("case", lambda one: one.measured.case),
            col("measured", _measured, "number"),
            col("goal", lambda one: one.goal.threshold, "number"),
            col("margin", lambda one: one.goal.margin(one.measured.value), "percent"),
        ],
    )
    counted = f"{reached} of {measured} measured goals are reached. The others:"
    return f"{counted}\n\n{markdown(missed).strip()}"


def _measured(one: Judged) -> Cell:
    value, low, high = one.measured.value, one.measured.low, one.measured.high
    if value is None or low is None or high is None:
        return value
    return Interval(value=value, low=low, high=high)
