"""Table of the lines of the user's code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stepscope.analysis.lines.facts import Lines, Place, Site
from stepscope.report.blocks import Table
from stepscope.report.tables import col, table

_MOST = 15
"""Lines shown, the most costly first."""


class _Row:
    """A line with the sum over all stacks that lead to it."""

    def __init__(self, place: Place, sites: list[Site]) -> None:
        self.place, self.sites = place, sites

    def total(self, field: str) -> float:
        return sum(float(getattr(site, field)) for site in self.sites)


def line_tables(lines: Lines | None, name: str) -> Iterator[Table]:
    """The lines by cost; nothing without any."""
    if lines is None:
        return
    sites: defaultdict[int, list[Site]] = defaultdict(list)
    for site in lines.sites:
        if site.stack:
            sites[site.stack[-1]].append(site)
    rows = [_Row(lines.places[place], several) for place, several in sites.items()]
    rows.sort(key=lambda row: -row.total("cost_ms"))
    if not rows:
        return
    on_device = lines.on_device
    yield table(
        f"{name}-lines",
        "Lines of your code by cost",
        rows[:_MOST],
        [
            col("line", lambda r: r.place.where, key=True),
            col("code", lambda r: r.place.code),
            col("share", lambda r: r.total("cost_ms") / lines.step_ms, "percent"),
            col("CPU time", lambda r: r.total("host_ms"), unit="ms"),
            *(
                (
                    col("device time", lambda r: r.total("device_ms"), unit="ms"),
                    col("waits", lambda r: r.total("waits"), "count"),
                )
                if on_device
                else ()
            ),
            col("operators", lambda r: r.total("operators"), "count"),
            col("in the backward pass", lambda r: r.total("backward"), "count"),
            col("copied", lambda r: r.total("copied_bytes"), "bytes"),
            col("allocated", lambda r: r.total("allocated_bytes"), "bytes"),
        ],
        caption="Per step. The backward pass of an operator belongs to the line of its forward"
        " pass; work of a library belongs to the line that calls it.",
    )
