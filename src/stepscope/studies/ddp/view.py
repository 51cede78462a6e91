"""Findings, figures and tables of the data parallelism study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.analysis.conclusions import NOTHING, conclude
from stepscope.analysis.effects import Effect, paired, ratio
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Figure, Finding, Table, Timeline
from stepscope.report.format import bytes_, duration, percent
from stepscope.report.tables import col, cols, table
from stepscope.studies.base import Result
from stepscope.studies.ddp.buckets import bucket_blocks
from stepscope.studies.ddp.cases import ALONE, TORCH, DDPCase
from stepscope.studies.ddp.results import PHASES, DDPResult
from stepscope.views.builders import bracketed, rated
from stepscope.views.figures import curves, lane
from stepscope.views.ranks import difference_column, step_column, variant_rows

Lanes = dict[str, dict[str, list[tuple[float, float, str]]]]
"""Timeline of a step by strategy and lane: start, end, label."""


def view(results: Sequence[Result[DDPCase]]) -> tuple[Block, ...]:
    known = [DDPResult(*result) for result in results]
    done = [timed for timed in known if timed.record.status == "ok"]
    return (
        *(finding for timed in done for finding in _findings(timed)),
        *(figure for timed in done for figure in _figures(timed)),
        *bucket_blocks(done),
        _table(known),
        *_rank_table(done),
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
    if timed.case.ranks == 1:
        overheads = {name: timed.exposed(name) for name in steps}
        cost = ", ".join(
            f"{duration(one.value) if one and one.above else 'not shown'} with {name}"
            for name, one in overheads.items()
        )
        yield timed.finding(
            "one-rank",
            "with one rank there is no communication; this is the overhead of the wrappers. A step"
            f" takes {duration(alone)} without a wrapper; the overhead is {cost}.",
            {"alone_ms": alone, **{name: timed.exposed_ms(name) for name in steps}},
        )
    else:
        best = min(steps, key=lambda name: steps[name])
        yield _fastest(timed, best, steps, alone)
        yield from _hidden(timed, best)
    yield from _against_torch(timed)
    yield from timed.correctness(name for name in timed.names if name != ALONE)


def _fastest(timed: DDPResult, best: str, steps: dict[str, float], alone: float) -> Finding:
    size = timed.record.quantity("gradient_bytes") or 0.0
    samples = timed.samples("step", best)
    others = {name: paired(samples, timed.samples("step", name)) for name in steps if name != best}
    alike = [name for name, effect in others.items() if not effect.above]
    rank = "has the lowest median," if alike or not others else "is the fastest at"
    more = f" Statistically indistinguishable: {', '.join(alike)}." if alike else ""
    own, naive = timed.exposed(best), timed.exposed("naive") if "naive" in others else None
    conclusion = NOTHING
    if own is not None and naive is not None:
        conclusion = conclude(
            f"Exposed communication: {duration(own.value)} with {best},"
            f" {duration(naive.value)} with naive.",
            naive,
            others["naive"],
        )
    return timed.finding(
        "fastest",
        f"{best} {rank} {duration(steps[best])} per step for {bytes_(size)} of gradients; without"
        f" communication a step takes {duration(alone)}.{more}",
        {
            "strategy": best,
            "step_ms": steps[best],
            "alone_ms": alone,
            "gradient_bytes": size,
            "exposed_ms": timed.exposed_ms(best),
            "exposed_naive_ms": timed.exposed_ms("naive") if "naive" in steps else None,
            "alike": ", ".join(alike),
        },
        conclusion=conclusion,
    )


def _hidden(timed: DDPResult, best: str) -> Iterator[Finding]:
    """Share of the best strategy's reductions that overlaps with the backward pass."""
    communication, exposed = timed.summary("communication", best), timed.exposed(best)
    if communication is None or not communication.low > 0:
        return
    conclusion, share = NOTHING, None
    if exposed is not None:
        share = Effect(
            max(0.0, 1 - exposed.value / communication.median),
            1 - exposed.high / communication.low,
            1 - max(0.0, exposed.low) / communication.high,
            neutral=0.0,
        )
        conclusion = conclude(
            f"At least {percent(share.low)} of that overlaps with the backward pass."
            if share.above
            else f"Its step is longer by {duration(exposed.value)}, so none of that overlaps.",
            share,
        )
    yield timed.finding(
        "hidden",
        f"the reductions of {best} take {duration(communication.median)} without overlap.",
        {
            "strategy": best,
            "communication_ms": communication.median,
            "share": share.value if share else None,
        },
        conclusion=conclusion,
    )


def against_torch(timed: DDPResult) -> tuple[str, Effect] | None:
    """The fastest bucketed strategy and its step time over that of torch's DDP."""
    baseline = timed.samples("step", TORCH)
    buckets = [name for name in timed.names if name.startswith("bucketed")]
    if not buckets or not baseline:
        return None
    best = min(buckets, key=lambda name: timed.median("step", name) or 0.0)
    return best, ratio(baseline, timed.samples("step", best))


def _against_torch(timed: DDPResult) -> Iterator[Finding]:
    if (result := against_torch(timed)) is None:
        return
    best, effect = result
    outcome = "slower" if effect.above else "faster"
    yield timed.finding(
        "against-torch",
        f"{best} takes {bracketed(effect)} the step time of torch's DistributedDataParallel"
        f"{f': it is {outcome}' if effect.shown else ': statistically indistinguishable'}.",
        {"strategy": best, "ratio": effect.value, "low": effect.low, "high": effect.high},
        tone=rated(effect),
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
            col("size", lambda r: r.of.case.size_name, key=True),
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
                lambda r: None if r.variant == ALONE else r.of.exposed_ms(r.variant),
                unit="ms",
                hint="step minus the step without communication; none if below zero",
            ),
            col(
                "reductions", lambda r: r.record.quantity("reductions", variant=r.variant), "count"
            ),
            difference_column(),
        ],
        caption="Step times of the slowest rank in each round; all strategies are interleaved on"
        " the same ranks. Phases are those of the median round. Without communication a rank trains"
        " on its share alone: its difference is that of a step without an average.",
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
