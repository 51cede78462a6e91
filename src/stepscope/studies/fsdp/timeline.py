"""Whether the gathers of FSDP end before their weights are needed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import NamedTuple

from stepscope.analysis.conclusions import NOTHING, conclude
from stepscope.analysis.effects import Effect, level
from stepscope.records.stats import Summary, summarize
from stepscope.report.blocks import Block, Finding, Lane, Timeline
from stepscope.report.format import duration, number, percent
from stepscope.report.tables import col, interval, table
from stepscope.studies.fsdp.gathers import GATHERS, Gather, RankGathers
from stepscope.studies.sharding.view import ShardingResult
from stepscope.views.builders import grouped
from stepscope.views.figures import lane

PASSES = ("forward", "backward")
_MAX_LABELED = 40
"""A timeline with more gathers has no labels on them."""


class Layer(NamedTuple):
    """The weights of a block, or of a module outside of the blocks, in one pass on one rank."""

    title: str
    rank: int
    gathers: list[Gather]

    @property
    def name(self) -> str:
        return self.gathers[0].layer

    @property
    def phase(self) -> str:
        return self.gathers[0].phase

    @property
    def latest(self) -> Gather:
        """The weight with the least margin."""
        return min(self.gathers, key=lambda gather: summarize(gather.margins).median)

    @property
    def margin(self) -> Summary:
        return summarize(self.latest.margins)

    @property
    def in_time(self) -> int:
        return sum(level(summarize(gather.margins)).above for gather in self.gathers)


class Timed(NamedTuple):
    """The recorded gathers of a case."""

    case: ShardingResult
    ranks: list[RankGathers]

    @property
    def waits(self) -> list[float]:
        """Time that the rank which waits longest for gathers spends so, per step."""
        of_ranks = (
            [
                sum(max(0.0, -margin) for margin in margins)
                for margins in zip(*(g.margins for g in rank.gathers), strict=True)
            ]
            for rank in self.ranks
        )
        return [max(each) for each in zip(*of_ranks, strict=False)]

    def layers(self, rank: int) -> list[Layer]:
        groups = grouped(self.ranks[rank].gathers, lambda gather: (gather.phase, gather.layer))
        return [Layer(self.case.title, rank, gathers) for gathers in groups.values()]


def gather_blocks(done: Sequence[ShardingResult]) -> Iterator[Block]:
    known = [
        Timed(case, ranks)
        for case in done
        if case.ranks > 1
        and (ranks := case.record.attachment(GATHERS, list[RankGathers]))
        and all(rank.gathers and rank.phases for rank in ranks)
    ]
    yield from map(_finding, known)
    for timed in known:
        yield _timeline(timed)
    rows = [
        layer for timed in known for rank in range(timed.case.ranks) for layer in timed.layers(rank)
    ]
    if rows:
        yield table(
            "fsdp-gathers",
            "When weights are gathered and when they are needed",
            rows,
            [
                col("case", lambda r: r.title),
                col("rank", lambda r: r.rank, "count"),
                col("pass", lambda r: r.phase),
                col("layer", lambda r: r.name),
                col("gathers", lambda r: len(r.gathers), "count"),
                col("in time", lambda r: r.in_time, "count", hint="the interval is above zero"),
                col("latest", lambda r: r.latest.weight, hint="the weight with the least margin"),
                col("gather ends", lambda r: summarize(r.latest.ended).median, unit="ms"),
                col("needed", lambda r: summarize(r.latest.needed).median, unit="ms"),
                col("margin", lambda r: interval(r.margin), unit="ms", hint="needed − gather ends"),
            ],
            caption="Medians over steps of FSDP, in ms from the start of the step. With a negative"
            " margin the layer waits for its weight. The first gather of a pass has nothing to"
            " overlap with.",
        )


def _finding(timed: Timed) -> Finding:
    gathers = [(rank, gather) for rank, one in enumerate(timed.ranks) for gather in one.gathers]
    margins = [level(summarize(gather.margins)) for _, gather in gathers]
    early, late = sum(m.above for m in margins), sum(m.below for m in margins)
    at = min(range(len(margins)), key=lambda index: margins[index].value)
    rank, worst = gathers[at]
    steps = [rank_phases[-1][1] for rank_phases in timed.ranks[0].phases]
    wait, step = summarize(timed.waits), summarize(steps)
    waited = level(wait)
    conclusion = NOTHING
    if late:
        conclusion = conclude(
            f"The gathers are not in time: a step waits {duration(wait.median)} for them,"
            f" {percent(wait.median / step.median)} of it.",
            waited,
            margins[at],
        )
    elif early == len(margins):
        conclusion = conclude("Every gather is in time.", *margins)
    return timed.case.finding(
        "in-time",
        f"of {len(gathers)} gathers of a step on all ranks, {early} end before their weight is"
        f" needed, {late} after it, and {len(gathers) - early - late} are inconclusive; the"
        f" least margin is {_bracketed(margins[at])} ({worst.weight}, {worst.phase}, rank {rank}).",
        {
            "gathers": len(gathers),
            "in_time": early,
            "late": late,
            "weight": worst.weight,
            "pass": worst.phase,
            "rank": rank,
            "margin_ms": margins[at].value,
            "margin_low_ms": margins[at].low,
            "margin_high_ms": margins[at].high,
            "wait_ms": wait.median,
            "wait_low_ms": wait.low,
            "wait_high_ms": wait.high,
            "step_ms": step.median,
        },
        conclusion=conclusion,
    )


def _bracketed(margin: Effect) -> str:
    """The margin with its interval, if there are enough steps for one."""
    value = f"{number(margin.value, 3)} ms"
    if not isfinite(margin.low + margin.high):
        return value
    return f"{value} [{number(margin.low, 3)}, {number(margin.high, 3)}]"


def _timeline(timed: Timed) -> Timeline:
    """The step of rank 0 whose length is the closest to the median."""
    rank = timed.ranks[0]
    ends = [phases[-1][1] for phases in rank.phases]
    median = summarize(ends).median
    step = min(range(len(ends)), key=lambda index: abs(ends[index] - median))
    lanes: list[Lane] = [
        lane("step", ((start, end, name, name) for start, end, name in rank.phases[step]))
    ]
    for phase in PASSES:
        own = [gather for gather in rank.gathers if gather.phase == phase]
        labeled = len(own) <= _MAX_LABELED
        gathering, waiting = [], []
        for gather in own:
            issued, ended, needed = gather.issued[step], gather.ended[step], gather.needed[step]
            group = "gather in time" if ended <= needed else "gather late"
            label = gather.weight.removesuffix(".weight") if labeled else ""
            gathering.append((issued, max(issued, ended), label, group))
            if ended > needed:
                waiting.append((needed, ended, label, "waited"))
        lanes.append(lane(f"{phase}: gathers", gathering))
        if waiting:
            lanes.append(lane(f"{phase}: waits", waiting))
    return Timeline(
        name=f"fsdp-timeline-{timed.case.record.case}",
        title=f"Gathers of a step: {timed.case.title}",
        lanes=tuple(lanes),
        x_label="ms",
        caption="A step of rank 0, the closest to the median. A gather is issued while the weight"
        " before it is in use; the layer waits from the moment when it needs the weight until the"
        " gather ends.",
    )
