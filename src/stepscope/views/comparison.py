"""Table of the comparison of two runs."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.compare import Comparison
from stepscope.report.blocks import Interval, Table
from stepscope.report.tables import col, table


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    units = sorted({c.unit for c in comparisons if c.base is not None})
    unit = units[0] if len(units) == 1 else ""
    several = any(c.of for c in comparisons)
    hint = "of the medians, 99 % interval; 98 % below 30 samples of one process"
    return table(
        "comparison",
        "New against base",
        comparisons,
        [
            col("study", lambda c: c.study),
            col("case", lambda c: c.case),
            *([col("of", lambda c: c.of or None, hint="variant of the case")] if several else []),
            col("base", lambda c: c.base, "number", unit=unit),
            col("new", lambda c: c.new, "number", unit=unit),
            *([col("unit", lambda c: c.unit)] if len(units) > 1 else []),
            col("new / base", _ratio, "number", hint=hint),
            col("change", lambda c: f"{c.ratio.value - 1:+.1%}" if c.ratio else None),
            col("verdict", lambda c: c.verdict),
            col("note", lambda c: c.note),
        ],
    )


def _ratio(c: Comparison) -> Interval | None:
    ratio = c.ratio
    return Interval(value=ratio.value, low=ratio.low, high=ratio.high) if ratio else None
