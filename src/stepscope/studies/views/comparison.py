"""Table of the comparison of two runs."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.compare import Comparison
from stepscope.report.blocks import Column, Interval, Table


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    units = sorted({c.unit for c in comparisons if c.base is not None})
    unit = units[0] if len(units) == 1 else ""
    several = any(c.of for c in comparisons)
    return Table(
        name="comparison",
        title="New against base",
        columns=(
            Column(title="study"),
            Column(title="case"),
            *([Column(title="of", hint="variant of the case")] if several else []),
            Column(title="base", kind="number", unit=unit),
            Column(title="new", kind="number", unit=unit),
            *([Column(title="unit")] if len(units) > 1 else []),
            Column(
                title="new / base",
                kind="number",
                hint="of the medians, 99 % interval; 98 % below 30 samples of one process",
            ),
            Column(title="change"),
            Column(title="verdict"),
            Column(title="note"),
        ),
        rows=tuple(
            (
                c.study,
                c.case,
                *([c.of or None] if several else []),
                c.base,
                c.new,
                *([c.unit] if len(units) > 1 else []),
                Interval(value=c.ratio.value, low=c.ratio.low, high=c.ratio.high)
                if c.ratio
                else None,
                f"{c.ratio.value - 1:+.1%}" if c.ratio else None,
                c.verdict,
                c.note,
            )
            for c in comparisons
        ),
    )
