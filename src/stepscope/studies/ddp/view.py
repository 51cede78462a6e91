"""Findings, figures and tables of data parallelism. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.stats import Ratio, paired_ratio, ratio_interval, summarize
from stepscope.report.blocks import (
    Block,
    Curve,
    Figure,
    Finding,
    Lane,
    LaneSpan,
    Table,
    Timeline,
    Tone,
)
from stepscope.report.format import bytes_, duration, number, percent
from stepscope.report.tables import col, cols, table
from stepscope.studies.base import Result
from stepscope.studies.ddp.cases import ALONE, TORCH, DDPCase
from stepscope.studies.ranks.results import RankedResult, step_column, strategy_rows
from stepscope.studies.views.published import published_tables, ranked_step

PHASES = ("forward", "backward", "waited", "optimizer")

Lanes = dict[str, dict[str, list[tuple[float, float, str]]]]
"""What a step did when, by strategy and lane: start, end, label."""


class Ways(RankedResult[DDPCase]):
    """One case: every strategy that was timed in it."""

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(s.variant for s in self.record.series if s.rank == 0))

    @property
    def title(self) -> str:
        at = f" at context {self.case.context}" if self.case.context else ""
        return f"{self.case.size}{at}, {self.place}, {self.case.dtype}"

    def phases(self, way: str) -> dict[str, float]:
        """In the round whose step is the median, of its slowest rank: they add up to the step."""
        steps = [s for s in self.record.series if (s.variant, s.name) == (way, "step")]
        rounds = [
            max((series.values[number], series.rank, number) for series in steps)
            for number in range(min((len(series.values) for series in steps), default=0))
        ]
        if not rounds:
            return {}
        _, rank, number = sorted(rounds)[(len(rounds) - 1) // 2]
        # Nothing is waited for after a backward that averages inside, or not at all.
        shown = [phase for phase in PHASES if phase != "waited" or self.summary("slowest", way)]
        found = {phase: self.record.find(phase, variant=way, rank=rank) for phase in shown}
        return {phase: s.values[number] for phase, s in found.items() if s is not None}

    def exposed(self, way: str) -> float | None:
        """What a step takes longer than one without communication."""
        step, alone = self.median("step", way), self.median("step", ALONE)
        return step - alone if step is not None and alone is not None else None


def ddp_blocks(results: Sequence[Result[DDPCase]]) -> tuple[Block, ...]:
    known = [Ways(*result) for result in results]
    done = [ways for ways in known if ways.record.status == "ok"]
    return (
        *(finding for ways in done for finding in _findings(ways)),
        *(figure for ways in done for figure in _pictures(ways)),
        _table(known),
        *_rank_table(done),
        *published_tables(
            "ddp",
            [
                ranked_step(*ways, way, ways.median("step", way))
                for ways in done
                for way in ways.names
            ],
        ),
    )


def _findings(ways: Ways) -> Iterator[Finding]:
    ours = [name for name in ways.names if name not in (ALONE, TORCH)]
    steps = {name: step for name in ours if (step := ways.median("step", name)) is not None}
    alone = ways.median("step", ALONE)
    if not steps or alone is None:
        return
    # Below zero is noise: communication does not make a step faster.
    exposed = {name: max(0.0, ways.exposed(name) or 0.0) for name in steps}
    if ways.case.ranks == 1:
        cost = ", ".join(f"{duration(ms)} with {name}" for name, ms in exposed.items())
        yield ways.finding(
            "one-rank",
            "one rank has nobody to average with. What the wrappers cost shows: a step takes"
            f" {duration(alone)} without one and longer by {cost}.",
            {"alone_ms": alone, **exposed},
        )
    else:
        best = min(steps, key=lambda name: steps[name])
        yield _fastest(ways, best, steps, exposed, alone)
        yield from _hidden(ways, best, exposed[best])
    yield from _against_torch(ways)


def _fastest(
    ways: Ways, best: str, steps: dict[str, float], exposed: dict[str, float], alone: float
) -> Finding:
    size = ways.record.quantity("gradient_bytes") or 0.0
    # Rounds are interleaved, so those of two ways are pairs.
    samples = ways.samples("step", best)
    alike = [
        name
        for name in steps
        if name != best and paired_ratio(samples, ways.samples("step", name)).low <= 1
    ]
    rank = "takes the least," if alike else "is the fastest at"
    more = [f"Not told from it: {', '.join(alike)}."] if alike else []
    if "naive" in steps and best != "naive":
        more.append(
            f"Exposed: {duration(exposed[best])} of {best}, {duration(exposed['naive'])} of naive."
        )
    return ways.finding(
        "fastest",
        f"{best} {rank} {duration(steps[best])} a step for {bytes_(size)} of gradients; without"
        f" communication it is {duration(alone)}.",
        {
            "strategy": best,
            "step_ms": steps[best],
            "alone_ms": alone,
            "gradient_bytes": size,
            "exposed_ms": exposed[best],
            "exposed_naive_ms": exposed.get("naive"),
            "alike": ", ".join(alike),
        },
        conclusion=" ".join(more),
    )


def _hidden(ways: Ways, best: str, exposed: float) -> Iterator[Finding]:
    """The share of the best strategy's reductions that the backward hides."""
    communication = ways.median("communication", best)
    if not communication:
        return
    share = min(1.0, 1 - exposed / communication)
    words = (
        f"{percent(share)} of that is hidden behind the backward."
        if share > 0
        else f"its step is longer by {duration(exposed)}, so nothing of that is hidden."
    )
    yield ways.finding(
        "hidden",
        f"the reductions of {best} take {duration(communication)} on their own; {words}",
        {"strategy": best, "communication_ms": communication, "share": max(0.0, share)},
    )


_OUTCOMES: dict[int, tuple[str, Tone]] = {
    -1: ("it is faster", "good"),
    0: ("no difference is shown", "info"),
    1: ("it is slower", "warn"),
}


def against_torch(ways: Ways) -> tuple[str, Ratio] | None:
    """The fastest bucketed strategy, and its step over that of torch's own wrapper."""
    theirs = ways.samples("step", TORCH)
    buckets = [name for name in ways.names if name.startswith("bucketed")]
    if not buckets or not theirs:
        return None
    best = min(buckets, key=lambda name: ways.median("step", name) or 0.0)
    return best, ratio_interval(theirs, ways.samples("step", best))


def _against_torch(ways: Ways) -> Iterator[Finding]:
    if (found := against_torch(ways)) is None:
        return
    best, ratio = found
    outcome, tone = _OUTCOMES[(ratio.low > 1) - (ratio.high < 1)]
    yield ways.finding(
        "against-torch",
        f"{best} takes {number(ratio.value, 3)}× the step of torch's DistributedDataParallel"
        f" [{number(ratio.low, 3)}, {number(ratio.high, 3)}]: {outcome}.",
        {"strategy": best, "ratio": ratio.value, "low": ratio.low, "high": ratio.high},
        tone=tone,
    )


def _pictures(ways: Ways) -> Iterator[Figure | Timeline]:
    phases = {name: ways.phases(name) for name in ways.names if ways.summary("forward", name)}
    if not phases:
        return
    yield Figure(
        name=f"ddp-phases-{ways.record.case}",
        title=f"Where a step goes: {ways.title}",
        kind="stacks",
        curves=tuple(
            Curve(
                label=phase,
                x=tuple(phases),
                y=tuple(found.get(phase, 0.0) for found in phases.values()),
            )
            for phase in PHASES
        ),
        x_label="way",
        y_label="ms",
        caption="The slowest rank in the round whose step is the median; `waited` is from the end"
        " of the backward until the gradients are averaged. torch's wrapper waits inside its"
        " backward.",
    )
    timeline = ways.record.attachment("timeline", Lanes) or {}
    lanes = [
        Lane(
            label=f"{name}: {lane}",
            stretches=tuple(
                LaneSpan(
                    start=start,
                    end=end,
                    label=label,
                    group=label if lane == "compute" else "reduction",
                )
                for start, end, label in _readable(stretches)
            ),
        )
        for name, held in timeline.items()
        for lane, stretches in held.items()
        if stretches
    ]
    if lanes:
        yield Timeline(
            name=f"ddp-timeline-{ways.record.case}",
            title=f"When reductions are under way: {ways.title}",
            lanes=tuple(lanes),
            x_label="ms",
            caption="One step of rank 0 for each, of a few the one nearest to its median. Where"
            " reductions lie beside the backward, they overlap.",
        )


def _readable(stretches: Sequence[tuple[float, float, str]]) -> Iterator[tuple[float, float, str]]:
    """Without the labels of those that a later one lies upon."""
    for place, (start, end, label) in enumerate(stretches):
        covered = any(later[0] < end for later in stretches[place + 1 :])
        yield start, end, "" if covered else label


def _table(known: Sequence[Ways]) -> Table:
    return table(
        "ddp-steps",
        "A step with each way to average gradients",
        strategy_rows(known, lambda ways: ways.names),
        [
            col("size", lambda r: r.of.case.size, key=True),
            col("context", lambda r: r.of.case.context or None, "count", key=True),
            col("ranks", lambda r: r.of.case.ranks, "count", key=True),
            col("dtype", lambda r: r.of.case.dtype, key=True),
            col("way", lambda r: r.way, key=True),
            step_column(),
            *cols(PHASES, lambda r, phase: r.of.phases(r.way).get(phase), unit="ms"),
            col(
                "communication",
                lambda r: r.of.median("communication", r.way),
                unit="ms",
                hint="its reductions with nothing to hide behind",
            ),
            col(
                "exposed",
                lambda r: None if r.way == ALONE else r.of.exposed(r.way),
                unit="ms",
                hint="step minus the step without communication",
            ),
            col("reductions", lambda r: r.record.quantity("reductions", variant=r.way), "count"),
        ],
        caption="Steps of the slowest rank in each round; all ways take turns in the same ranks."
        " Phases are those of the round whose step is the median.",
    )


def _rank_table(done: Sequence[Ways]) -> Iterator[Table]:
    rows = [
        (ways, way, rank, waited, transfer)
        for ways in done
        for way in ways.names
        for rank in range(ways.case.ranks)
        if (waited := ways.record.find("slowest", variant=way, rank=rank))
        and (transfer := ways.record.find("transfer", variant=way, rank=rank))
    ]
    if rows:
        yield table(
            "ddp-waits",
            "What each rank waits for",
            rows,
            [
                col("case", lambda r: r[0].title),
                col("way", lambda r: r[1]),
                col("rank", lambda r: r[2], "count"),
                col("slowest rank", lambda r: summarize(r[3].values).median, unit="ms"),
                col("transfer", lambda r: summarize(r[4].values).median, unit="ms"),
            ],
            caption="At the end of the backward: until the last rank has arrived, and from then"
            " until its gradients are there.",
        )
