"""Accuracy of past predictions on a device, and its trend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from stepscope.analysis.advice.calibration import Verified, factors, is_right, median_error
from stepscope.report.blocks import Block, Curve, Figure, Finding, Table
from stepscope.report.format import percent
from stepscope.report.tables import col, table
from stepscope.views.builders import grouped

_TREND_FROM = 6
"""Verifications from which on a trend is reported."""
_SHOWN = 100
"""Newest verifications in the figure."""


def history_blocks(history: Sequence[Verified], device: str) -> tuple[Block, ...]:
    own = [one for one in history if one.device == device]
    if not own:
        return ()
    return (*_findings(own), *_figure(own), _corrections(own, device))


def _findings(own: Sequence[Verified]) -> Iterator[Finding]:
    right, error = sum(map(is_right, own)), median_error(own) or 0.0
    yield Finding(
        code="advice.predictions-so-far",
        values={"verified": len(own), "right": right, "off": error},
        text=f"Verified predictions on this device: {len(own)}. For {right} of them the measured"
        f" gain was within a third of the predicted gain; the median error is {percent(error)} of"
        " the step.",
    )
    if len(own) >= _TREND_FROM:
        half = len(own) // 2
        first, last = median_error(own[:half]) or 0.0, median_error(own[half:]) or 0.0
        yield Finding(
            code="advice.predictions-trend",
            values={"first_half_off": first, "second_half_off": last},
            text=f"The median error was {percent(first)} for the first half of them and"
            f" {percent(last)} for the second.",
        )


def _figure(own: Sequence[Verified]) -> Iterator[Figure]:
    if len(own) < 2:
        return
    shown = own[-_SHOWN:]
    indices = tuple(float(index + 1) for index in range(len(shown)))
    yield Figure(
        name="advise-history",
        title="Error of every prediction so far",
        x_label="verification",
        y_label="|measured - predicted| of the step (%)",
        curves=(Curve(label="error", x=indices, y=tuple(100 * abs(one.error) for one in shown)),),
    )


def _corrections(own: Sequence[Verified], device: str) -> Table:
    known = factors(own, device)
    return table(
        "advise-corrections",
        "Correction of each rule by its verifications",
        grouped(own, lambda one: one.code).items(),
        [
            col("change", lambda r: r[0]),
            col("verified", lambda r: len(r[1]), "count"),
            col(
                "by the rule",
                lambda r: median(v.by_rule / v.step_ms for v in r[1]),
                "percent",
                hint="median predicted gain, share of the step",
            ),
            col(
                "measured",
                lambda r: median(v.realized_ms / v.step_ms for v in r[1]),
                "percent",
                hint="median measured gain, share of the step",
            ),
            col(
                "next time",
                lambda r: known.get(r[0], 1.0),
                unit="×",
                hint="factor applied to the gain that the rule predicts",
            ),
        ],
        caption=f"Stored for {device} in this user's cache. The factor uses the newest twenty"
        " verifications of each rule, plus one that is exactly right.",
    )
