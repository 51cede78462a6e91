"""How good predictions were so far on a device, and whether they get better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from stepscope.analysis.advice.calibration import Verified, factors, is_right, off_by
from stepscope.report.blocks import Block, Column, Curve, Figure, Finding, Table
from stepscope.report.format import percent

_TREND_FROM = 6
_SHOWN = 100


def history_blocks(history: Sequence[Verified], device: str) -> tuple[Block, ...]:
    own = [one for one in history if one.device == device]
    if not own:
        return ()
    return (*_findings(own), *_figure(own), _corrections(own, device))


def _findings(own: Sequence[Verified]) -> Iterator[Finding]:
    right = sum(map(is_right, own))
    yield Finding(
        text=f"Predictions verified on this device so far: {len(own)}. Of those, {right} gained"
        f" within a third of what was predicted; the median error is {percent(off_by(own) or 0)} of"
        " the step."
    )
    if len(own) >= _TREND_FROM:
        half = len(own) // 2
        first, last = off_by(own[:half]) or 0.0, off_by(own[half:]) or 0.0
        yield Finding(
            text=f"It was {percent(first)} for the first half of them and {percent(last)} for the"
            " second.",
            tone="good" if last < first else "info",
        )


def _figure(own: Sequence[Verified]) -> Iterator[Figure]:
    if len(own) < 2:
        return
    shown = own[-_SHOWN:]
    places = tuple(float(place + 1) for place in range(len(shown)))
    yield Figure(
        name="advise-history",
        title="Error of every prediction so far",
        kind="lines",
        x_label="verification",
        y_label="|realised - predicted| of the step (%)",
        curves=(Curve(label="error", x=places, y=tuple(100 * abs(one.error) for one in shown)),),
    )


def _corrections(own: Sequence[Verified], device: str) -> Table:
    known = factors(own, device)

    def row(code: str) -> tuple[str, int, float, float, float]:
        members = [one for one in own if one.code == code]
        return (
            code,
            len(members),
            median(one.by_rule / one.step_ms for one in members),
            median(one.realised_ms / one.step_ms for one in members),
            known.get(code, 1.0),
        )

    return Table(
        name="advise-corrections",
        title="What verifications say of each rule",
        columns=(
            Column(title="change"),
            Column(title="verified", kind="count"),
            Column(title="by the rule", kind="percent", hint="median gain of the step, predicted"),
            Column(title="realised", kind="percent", hint="median gain of the step"),
            Column(title="next time", kind="number", unit="×", hint="what the rule's gain gets"),
        ),
        rows=tuple(row(code) for code in dict.fromkeys(one.code for one in own)),
        caption=f"Kept for {device} in this user's cache; the newest twenty of each count, with one"
        " that was exactly right.",
    )
