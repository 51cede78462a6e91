"""Findings, figures and tables of the data parallelism study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.stats import Ratio, paired_ratio, ratio_interval, summarize
from stepscope.report.blocks import Block, Figure, Finding, Table, Timeline, Tone
from stepscope.report.format import bytes_, duration, number, percent
from stepscope.report.tables import col, cols, table
from stepscope.studies.base import Result
from stepscope.studies.ddp.cases import ALONE, TORCH, DDPCase
from stepscope.studies.ranks.results import RankedResult, step_column, variant_rows
from stepscope.studies.views.figures import curves, lane
from stepscope.studies.views.published import published_tables, ranked_step

PHASES = ("forward", "backward", "waited", "optimizer")

Lanes = dict[str, dict[str, list[tuple[float, float, str]]]]
"""Timeline of a step by strategy and lane: start, end, label."""


class DDPResult(RankedResult[DDPCase]):
    """All strategies timed in one case."""

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(s.variant for s in self.record.series if s.rank == 0))

    @property
    def title(self) -> str:
        at = f" at context {self.case.context}" if self.case.context else ""
        return f"{self.case.size}{at}, {self.label}, {self.case.dtype}"

    def phases(self, strategy: str) -> dict[str, float]:
        """Phases of the slowest rank in the median round; they add up to its step time."""
        steps = [s for s in self.record.series if (s.variant, s.name) == (strategy, "step")]
        rounds = [
            max((series.values[index], series.rank, index) for series in steps)
            for index in range(min((len(series.values) for series in steps), default=0))
        ]
        if not rounds:
            return {}
        _, rank, index = sorted(rounds)[(len(rounds) - 1) // 2]
        # There is no wait after a backward pass that averages inside or not at all.
        shown = [
            phase for phase in PHASES if phase != "waited" or self.summary("slowest", strategy)
        ]
        series = {phase: self.record.find(phase, variant=strategy, rank=rank) for phase in shown}
        return {phase: s.values[index] for phase, s in series.items() if s is not None}

    def exposed(self, strategy: str) -> float | None:
        """Step time minus that of the step without communication."""
        step, alone = self.median("step", strategy), self.median("step", ALONE)
        return step - alone if step is not None and alone is not None else None


def view(results: Sequence[Result[DDPCase]]) -> tuple[Block, ...]:
    known = [DDPResult(*result) for result in results]
    done = [timed for timed in known if timed.record.status == "ok"]
    return (
        *(finding for timed in done for finding in _findings(timed)),
        *(figure for timed in done for figure in _figures(timed)),
        _table(known),
        *_rank_table(done),
        *published_tables(
            "ddp",
            [
                ranked_step(*timed, strategy, timed.median("step", strategy))
                for timed in done
                for strategy in timed.names
            ],
        ),
    )


def _findings(timed: DDPResult) -> Iterator[Finding]:
    steps = {
        name: step
        for name in timed.names
        if name not in (ALONE, TORCH) and (step := timed.median("step", name)) is not None
    }
    alone = timed.median("step", ALONE)
    if not steps or alone is None:
        return
    # Negative values are noise: communication does not make a step faster.
    exposed = {name: max(0.0, timed.exposed(name) or 0.0) for name in steps}
    if timed.case.ranks == 1:
        cost = ", ".join(f"{duration(ms)} with {name}" for name, ms in exposed.items())
        yield timed.finding(
            "one-rank",
            "with one rank there is no communication; this is the overhead of the wrappers. A step"
            f" takes {duration(alone)} without a wrapper; the overhead is {cost}.",
            {"alone_ms": alone, **exposed},
        )
    else:
        best = min(steps, key=lambda name: steps[name])
        yield _fastest(timed, best, steps, exposed, alone)
        yield from _hidden(timed, best, exposed[best])
    yield from _against_torch(timed)


def _fastest(
    timed: DDPResult, best: str, steps: dict[str, float], exposed: dict[str, float], alone: float
) -> Finding:
    size = timed.record.quantity("gradient_bytes") or 0.0
    # Rounds are interleaved, so the samples of two strategies are paired.
    samples = timed.samples("step", best)
    alike = [
        name
        for name in steps
        if name != best and paired_ratio(samples, timed.samples("step", name)).low <= 1
    ]
    rank = "has the lowest median," if alike else "is the fastest at"
    more = [f"Statistically indistinguishable: {', '.join(alike)}."] if alike else []
    if "naive" in steps and best != "naive":
        more.append(
            f"Exposed communication: {duration(exposed[best])} with {best},"
            f" {duration(exposed['naive'])} with naive."
        )
    return timed.finding(
        "fastest",
        f"{best} {rank} {duration(steps[best])} per step for {bytes_(size)} of gradients; without"
        f" communication a step takes {duration(alone)}.",
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


def _hidden(timed: DDPResult, best: str, exposed: float) -> Iterator[Finding]:
    """Share of the best strategy's reductions that overlaps with the backward pass."""
    communication = timed.median("communication", best)
    if not communication:
        return
    share = min(1.0, 1 - exposed / communication)
    words = (
        f"{percent(share)} of that overlaps with the backward pass."
        if share > 0
        else f"its step is longer by {duration(exposed)}, so none of that overlaps."
    )
    yield timed.finding(
        "hidden",
        f"the reductions of {best} take {duration(communication)} without overlap; {words}",
        {"strategy": best, "communication_ms": communication, "share": max(0.0, share)},
    )


_OUTCOMES: dict[int, tuple[str, Tone]] = {
    -1: ("it is faster", "good"),
    0: ("statistically indistinguishable", "info"),
    1: ("it is slower", "warn"),
}


def against_torch(timed: DDPResult) -> tuple[str, Ratio] | None:
    """The fastest bucketed strategy and its step time over that of torch's DDP."""
    baseline = timed.samples("step", TORCH)
    buckets = [name for name in timed.names if name.startswith("bucketed")]
    if not buckets or not baseline:
        return None
    best = min(buckets, key=lambda name: timed.median("step", name) or 0.0)
    return best, ratio_interval(baseline, timed.samples("step", best))


def _against_torch(timed: DDPResult) -> Iterator[Finding]:
    if (result := against_torch(timed)) is None:
        return
    best, ratio = result
    outcome, tone = _OUTCOMES[(ratio.low > 1) - (ratio.high < 1)]
    yield timed.finding(
        "against-torch",
        f"{best} takes {number(ratio.value, 3)}× the step time of torch's DistributedDataParallel"
        f" [{number(ratio.low, 3)}, {number(ratio.high, 3)}]: {outcome}.",
        {"strategy": best, "ratio": ratio.value, "low": ratio.low, "high": ratio.high},
        tone=tone,
    )


def _figures(timed: DDPResult) -> Iterator[Figure | Timeline]:
    phases = {name: timed.phases(name) for name in timed.names if timed.summary("forward", name)}
    if not phases:
        return
    yield Figure(
        name=f"ddp-phases-{timed.record.case}",
        title=f"Phases of a step: {timed.title}",
        kind="stacks",
        curves=curves(
            {
                phase: {name: times.get(phase, 0.0) for name, times in phases.items()}
                for phase in PHASES
            }
        ),
        x_label="strategy",
        y_label="ms",
        caption="The slowest rank in the median round; `waited` is the time from the end of the"
        " backward pass until the gradients are averaged. torch's DDP waits inside that pass.",
    )
    timeline = timed.record.attachment("timeline", Lanes) or {}
    lanes = [
        lane(
            f"{name}: {what}",
            (
                (start, end, label, label if what == "compute" else "reduction")
                for start, end, label in _without_covered_labels(spans)
            ),
        )
        for name, by_lane in timeline.items()
        for what, spans in by_lane.items()
        if spans
    ]
    if lanes:
        yield Timeline(
            name=f"ddp-timeline-{timed.record.case}",
            title=f"Timeline of reductions: {timed.title}",
            lanes=tuple(lanes),
            x_label="ms",
            caption="One step of rank 0 for each strategy, the closest to the median of a few."
            " Reductions drawn below the backward pass overlap with it.",
        )


def _without_covered_labels(
    spans: Sequence[tuple[float, float, str]],
) -> Iterator[tuple[float, float, str]]:
    """Remove the labels of spans that a later span overlaps."""
    for index, (start, end, label) in enumerate(spans):
        covered = any(later[0] < end for later in spans[index + 1 :])
        yield start, end, "" if covered else label


def _table(known: Sequence[DDPResult]) -> Table:
    return table(
        "ddp-steps",
        "A step with each strategy for averaging gradients",
        variant_rows(known, lambda timed: timed.names),
        [
            col("size", lambda r: r.of.case.size, key=True),
            col("context", lambda r: r.of.case.context or None, "count", key=True),
            col("ranks", lambda r: r.of.case.ranks, "count", key=True),
            col("dtype", lambda r: r.of.case.dtype, key=True),
            col("strategy", lambda r: r.variant, key=True),
            step_column(),
            *cols(PHASES, lambda r, phase: r.of.phases(r.variant).get(phase), unit="ms"),
            col(
                "communication",
                lambda r: r.of.median("communication", r.variant),
                unit="ms",
                hint="its reductions without overlap",
            ),
            col(
                "exposed",
                lambda r: None if r.variant == ALONE else r.of.exposed(r.variant),
                unit="ms",
                hint="step minus the step without communication",
            ),
            col(
                "reductions", lambda r: r.record.quantity("reductions", variant=r.variant), "count"
            ),
        ],
        caption="Step times of the slowest rank in each round; all strategies are interleaved on"
        " the same ranks. Phases are those of the median round.",
    )


def _rank_table(done: Sequence[DDPResult]) -> Iterator[Table]:
    rows = [
        (timed, strategy, rank, waited, transfer)
        for timed in done
        for strategy in timed.names
        for rank in range(timed.case.ranks)
        if (waited := timed.record.find("slowest", variant=strategy, rank=rank))
        and (transfer := timed.record.find("transfer", variant=strategy, rank=rank))
    ]
    if rows:
        yield table(
            "ddp-waits",
            "Wait of each rank after the backward pass",
            rows,
            [
                col("case", lambda r: r[0].title),
                col("strategy", lambda r: r[1]),
                col("rank", lambda r: r[2], "count"),
                col("slowest rank", lambda r: summarize(r[3].values).median, unit="ms"),
                col("transfer", lambda r: summarize(r[4].values).median, unit="ms"),
            ],
            caption="After the backward pass: time until the slowest rank arrives, then time until"
            " the gradients are averaged.",
        )
