"""Tables and figures of the step study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.analysis.limits import mfu, tokens_per_second
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Cell, Column, Curve, Figure, Interval, Table
from stepscope.report.format import percent
from stepscope.studies.step.findings import step_findings
from stepscope.studies.step.ladder import RUNGS, START, words
from stepscope.studies.step.power import power_table
from stepscope.studies.step.rows import (
    AGREES_WITHIN,
    FALLS_BY,
    Ladder,
    Stand,
    curves,
    ladders,
    races,
    traced,
)
from stepscope.studies.step.rows import Curve as LossCurve
from stepscope.studies.step.speed import heat_table, speed_tables
from stepscope.studies.waterfall_view import fall_of, waterfall_blocks

_STATUS = {"oom": "OOM"}
_POINTS, _STRETCHES = 60, 20
"""Of a loss curve, and of its distance from another: each is the mean of the steps up to the
next."""


def step_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    climbed, learnt, raced = ladders(records), curves(records), races(records)
    falls = [
        fall
        for one in traced(records)
        if (fall := fall_of(one.record, one.workload, one.trace)) is not None
    ]
    lost = [r for r in records if r.status != "ok" and r.config["kind"] in ("waterfall", "race")]
    return (
        *step_findings(climbed, learnt, raced),
        *speed_tables(raced),
        *power_table(raced),
        *(block for ladder in climbed for block in _ladder_blocks(ladder, climbed)),
        *waterfall_blocks(falls, "step"),
        *_loss_blocks(learnt),
        *heat_table(raced),
        *([_lost_table(lost)] if lost else []),
    )


def _suffix(ladder: Ladder, every: Sequence[Ladder]) -> str:
    return "" if len(every) == 1 else f"-{every.index(ladder) + 1}"


def _ladder_blocks(ladder: Ladder, every: Sequence[Ladder]) -> Iterator[Block]:
    suffix = _suffix(ladder, every)
    climb = [stand for stand in ladder.climb() if stand.step]
    if len(climb) > 1:
        yield Figure(
            name=f"step-climb{suffix}",
            title=f"From the plainest step to the fastest: {ladder.name}",
            kind="bars",
            curves=(
                Curve(
                    label="step",
                    x=tuple(_short(stand) for stand in climb),
                    y=tuple(stand.step.median for stand in climb if stand.step),
                ),
            ),
            x_label="each with all before it that stay; see the table for those that do not",
            y_label="step, ms",
        )
    yield _ladder_table(ladder, suffix)


def _short(stand: Stand) -> str:
    return "start" if stand.rung == START else f"+ {stand.rung}"


def _ladder_table(ladder: Ladder, suffix: str) -> Table:
    rows: list[tuple[Cell, ...]] = []
    first, below = ladder.first, None
    for stand in ladder.stands:
        how = {"start": "", "first": "both", "alone": "alone", "so far": "on those before"}[
            stand.how
        ]
        named = (words(stand.rung), how)
        if stand.step is None:
            status = _STATUS.get(stand.record.status, stand.record.status)
            rows.append((*named, status, *(None,) * 7, stand.record.reason))
            continue
        ms = stand.step.median
        climbs = stand in ladder.climb()
        rows.append(
            (
                *named,
                Interval(value=ms, low=stand.step.low, high=stand.step.high),
                first.step.median / ms if first and first.step else None,
                _gain(below, stand) if below and climbs else None,
                _whole(tokens_per_second(stand.record)),
                mfu(stand.record),
                mfu(stand.record, measured=False),
                stand.host.fraction if stand.host else None,
                stand.peak,
                None,
            )
        )
        if climbs and (stand.rung == START or RUNGS[stand.rung].stays):
            below = stand
    return Table(
        name=f"step-ladder{suffix}",
        title=f"Each change alone and on top of those before it: {ladder.name}",
        columns=(
            Column(title="change"),
            Column(title="how"),
            Column(title="step", kind="number", unit="ms", hint="median with its 95 % interval"),
            Column(title="against the start", kind="number", unit="×"),
            Column(title="against the rung before", kind="number", unit="×"),
            Column(title="tokens/s", kind="count"),
            Column(title="MFU, measured", kind="percent", hint="of the matrix rate of its format"),
            Column(title="MFU, data sheet", kind="percent"),
            Column(
                title="host-bound",
                kind="percent",
                hint="share of the step in phases that were no faster than their launches",
            ),
            Column(title="peak memory", kind="bytes"),
            Column(title="why not"),
        ),
        rows=tuple(rows),
        caption="Alone: the start with this one change. On those before: on top of every change"
        " above it that stays; torch.compile, searched kernels, narrower formats, master weights"
        " and checkpointing do not. What is no graph where the rung before is one is not held"
        " against it. Both: the two are the same. MFU is of the rate of each step's own format,"
        " so a faster format can lower it.",
    )


def _gain(below: Stand, stand: Stand) -> float | None:
    """None where one is a graph and the other is not by the change's own doing: that would be the
    graph's."""
    loses_graph = below.workload.graph and not stand.workload.graph
    if below.step is None or stand.step is None or loses_graph:
        return None
    return below.step.median / stand.step.median


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _loss_blocks(learnt: dict[str, LossCurve]) -> Iterator[Block]:
    if not learnt:
        return
    shown = {rung: curve for rung, curve in learnt.items() if curve.by_seed}
    if shown:
        yield Figure(
            name="step-loss-curves",
            title="The loss while a text is learnt",
            kind="lines",
            curves=tuple(_thinned(rung, curve) for rung, curve in shown.items()),
            x_label="step of training",
            y_label="loss, nats",
            caption="Mean of the seeds. The text is a chain of words, each followed by one of eight"
            " others; all rungs read the same.",
        )
        yield from _apart(shown)
    yield _loss_table(learnt)


def _apart(shown: dict[str, LossCurve]) -> Iterator[Figure]:
    """Curves that lie upon each other say nothing of their distance."""
    if START not in shown:
        return
    steps = max(1, len(shown[START].mean()) // _STRETCHES)
    apart = {
        rung: shares
        for rung, curve in shown.items()
        if rung != START and (shares := curve.apart_by_stretch(shown[START], steps))
    }
    if not apart:
        return
    yield Figure(
        name="step-loss-apart",
        title="How far the loss is from that of the start",
        kind="lines",
        curves=tuple(
            Curve(
                label=rung,
                x=tuple(steps * (at + 0.5) for at in range(len(shares))),
                y=tuple(100 * share for share in shares),
            )
            for rung, shares in apart.items()
        ),
        x_label="step of training",
        y_label="more than the start's loss, %",
        caption=f"Each seed against the start with the same seed, in stretches of {steps} steps;"
        f" mean of the seeds. At the end {percent(AGREES_WITHIN)} are allowed.",
    )


def _thinned(rung: str, curve: LossCurve) -> Curve:
    mean = curve.mean()
    stride = max(1, len(mean) // _POINTS)
    parts = [mean[at : at + stride] for at in range(0, len(mean), stride)]
    return Curve(
        label="start" if rung == START else rung,
        x=tuple(float(1 + place * stride) for place in range(len(parts))),
        y=tuple(sum(part) / len(part) for part in parts),
    )


def _loss_table(learnt: dict[str, LossCurve]) -> Table:
    yardstick = learnt.get(START)
    fell = yardstick.fell_by() if yardstick is not None else None
    learnt_at_all = fell is not None and fell >= FALLS_BY
    rows: list[tuple[Cell, ...]] = []
    for rung, curve in learnt.items():
        ends = curve.ends()
        if not ends:
            first = curve.lost[0]
            status = _STATUS.get(first.status, first.status)
            rows.append((words(rung), 0, None, None, None, None, f"{status}: {first.reason}"))
            continue
        apart = curve.apart(yardstick) if yardstick is not None and rung != START else None
        verdict = None if apart is None else "same" if abs(apart) <= AGREES_WITHIN else "apart"
        if verdict is not None and not learnt_at_all:
            verdict = "too short to tell"
        rows.append(
            (
                words(rung),
                len(ends),
                sum(values[0] for values in curve.by_seed.values()) / len(ends),
                sum(ends.values()) / len(ends),
                curve.fell_by(),
                apart,
                verdict,
            )
        )
    return Table(
        name="step-loss",
        title="Does it still learn the same?",
        columns=(
            Column(title="with all before"),
            Column(title="seeds", kind="count"),
            Column(title="first loss", kind="number", unit="nats"),
            Column(title="at the end", kind="number", unit="nats", hint="mean of the last tenth"),
            Column(title="fell by", kind="percent", hint="the least of all seeds"),
            Column(title="from float32", kind="percent", hint="the farthest of all seeds"),
            Column(title="verdict"),
        ),
        rows=tuple(rows),
        caption=f"Same: at the end within {percent(AGREES_WITHIN)} of the float32 curve of its"
        f" seed. A text counts as learnt where the loss falls by at least {percent(FALLS_BY)}.",
    )


def _lost_table(lost: Sequence[Record]) -> Table:
    return Table(
        name="step-lost",
        title="Not measured",
        columns=(Column(title="case"), Column(title="status"), Column(title="reason")),
        rows=tuple((record.case, record.status, record.reason) for record in lost),
    )
