"""Findings, figures and tables of the sharded optimizer, partly shared with `fsdp`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.analysis.conclusions import NOTHING, conclude, deduced
from stepscope.analysis.effects import ratio
from stepscope.report.blocks import Block, Figure, Finding, Table, Value
from stepscope.report.format import bytes_, percent
from stepscope.report.tables import Declared, col, cols, table
from stepscope.studies.base import Result
from stepscope.studies.sharding.cases import BROADCAST, SCATTER, STRATEGIES, TORCH, UNSHARDED
from stepscope.training.ranks.subject import RankedStep
from stepscope.views.builders import bracketed, rated
from stepscope.views.figures import curves
from stepscope.views.ranks import (
    RankedResult,
    difference_column,
    step_column,
    variant_rows,
)

KINDS = ("parameters", "gradients", "state")
AFTER_STEP = "after step"
STATIONS = (
    "after model",
    "after forward",
    "after backward",
    AFTER_STEP,
    "before next step",
    "peak",
)
COUNTERS = ("allocated", "reserved", "driver")


class ShardingResult(RankedResult[RankedStep]):
    """Memory and times of each strategy of one case."""

    @property
    def ranks(self) -> int:
        return self.case.ranks

    @property
    def title(self) -> str:
        return f"{self.case.size_name}, {self.label}"

    def moved(self, strategy: str) -> float | None:
        """Predicted bytes that a rank sends per step."""
        size = self.by_rank("parameters", UNSHARDED)
        return moved(strategy, size[0], self.ranks) if size else None

    def ratio_finding(
        self, what: str, strategy: str, baseline: str, words: str, *, is_rated: bool = False
    ) -> Iterator[Finding]:
        """Step time of a strategy over that of a baseline; `words` has a placeholder for the
        ratio. If `is_rated`, the tone says which is faster."""
        base, own = self.samples("step", baseline), self.samples("step", strategy)
        if base and own:
            effect = ratio(base, own)
            yield self.finding(
                what,
                f"{words.format(bracketed(effect))}.",
                {"ratio": effect.value, "low": effect.low, "high": effect.high},
                tone=rated(effect) if is_rated else "info",
            )


def moved(strategy: str, size: float, ranks: int) -> float:
    """Predicted bytes that a rank sends per step for `size` bytes of parameters.

    Assumes bandwidth-optimal collectives. FSDP gathers every parameter twice and reduces it once.
    """
    return (2 if strategy in (UNSHARDED, SCATTER) else 3) * size * (ranks - 1) / ranks


def view(results: Sequence[Result[RankedStep]]) -> tuple[Block, ...]:
    known = [ShardingResult(*result) for result in results]
    done = [case for case in known if case.record.status == "ok"]
    return (
        *(finding for case in done for finding in _findings(case)),
        *(figure for case in done for figure in memory_figure(case, STRATEGIES)),
        _table(known),
        *_stages(done),
        *station_table(done, STRATEGIES),
    )


def _findings(case: ShardingResult) -> Iterator[Finding]:
    yield from alone_finding(case) if case.ranks == 1 else _shares(case)
    yield from case.ratio_finding(
        "against-torch",
        BROADCAST,
        TORCH,
        "a step takes {} the time of torch's ZeroRedundancyOptimizer",
        is_rated=True,
    )
    yield from counter_finding(case, BROADCAST)
    yield from case.correctness(STRATEGIES)
    yield from refused_findings(case, STRATEGIES)


def alone_finding(case: ShardingResult) -> Iterator[Finding]:
    text = "with one rank there is no communication; this is the overhead of the wrappers."
    yield case.finding("one-rank", text, {})


def refused_findings(case: ShardingResult, strategies: Sequence[str]) -> Iterator[Finding]:
    refused = case.record.attachment("refused", dict[str, str]) or {}
    for strategy in strategies:
        if reason := refused.get(strategy):
            values = {"way": strategy, "reason": reason}
            yield case.finding(
                "refused", f"{strategy} does not run here: {reason}", values, tone="warn"
            )


def counter_finding(case: ShardingResult, strategy: str) -> Iterator[Finding]:
    """Memory after a step by three counters, which need not agree."""
    pairs = {
        counter: [case.most(counter, name, AFTER_STEP) for name in (UNSHARDED, strategy)]
        for counter in COUNTERS
    }
    sizes = {name: (a, b) for name, (a, b) in pairs.items() if a is not None and b is not None}
    if len(sizes) < len(COUNTERS):
        return
    words = {name: f"{bytes_(base)} and {bytes_(own)}" for name, (base, own) in sizes.items()}
    rises = {name: own - base for name, (base, own) in sizes.items()}
    yield case.finding(
        "counters",
        f"after a step, unsharded and {strategy}, a rank has allocated {words['allocated']} and"
        f" its allocator has reserved {words['reserved']}; the driver reports {words['driver']} for"
        " all processes on the GPU.",
        {
            f"{name} {variant}": size
            for name, pair in sizes.items()
            for variant, size in zip((UNSHARDED, strategy), pair, strict=True)
        },
        conclusion=deduced(
            "The driver reports more although less is allocated: its value includes the allocator's"
            " cache and the libraries, not only memory in use."
        )
        if rises["driver"] > 0 > rises["allocated"]
        else NOTHING,
        timed=False,
    )


def _shares(case: ShardingResult) -> Iterator[Finding]:
    unsharded, sharded = case.by_rank("state", UNSHARDED), case.by_rank("state", BROADCAST)
    if not (unsharded and sharded and case.by_rank("parameters", UNSHARDED)):
        return
    equal = unsharded[0] / case.ranks
    off = max(abs(share - equal) for share in sharded) / equal if equal else 0.0
    yield case.finding(
        "share",
        f"the AdamW state takes {bytes_(unsharded[0])} on every rank unsharded and at most"
        f" {bytes_(max(sharded))} when parameters are assigned to ranks by size: {percent(off)}"
        " from an equal share.",
        {"whole_bytes": unsharded[0], "most_bytes": max(sharded), "off": off},
        tone="good" if off <= 0.02 else "info",
        timed=False,
    )
    yield _difference(case)


def _difference(case: ShardingResult) -> Finding:
    """Compare with ZeRO stage 1 in communication, memory and time."""
    sent = {strategy: case.moved(strategy) or 0.0 for strategy in (BROADCAST, SCATTER)}
    values: dict[str, Value] = {f"moved {strategy}": size for strategy, size in sent.items()}
    measured, why = "", NOTHING
    owned, cut = case.samples("step", BROADCAST), case.samples("step", SCATTER)
    if owned and cut:
        effect = ratio(owned, cut)
        values |= {"ratio": effect.value, "low": effect.low, "high": effect.high}
        measured = f" Here its step takes {bracketed(effect)} the time."
        if effect.above:
            words = ", and gloo implements reduce-scatter by all-reduce" * (case.backend == "gloo")
            why = conclude(
                "It is slower because its reduction starts after the backward pass, while the"
                f" other's overlaps with it{words}.",
                effect,
            )
    return case.finding(
        "stage-1",
        "averaging all gradients and then broadcasting the parameters from their owners sends"
        f" {bytes_(sent[BROADCAST])} per rank and step; ZeRO stage 1 (reduce-scatter, then"
        f" all-gather) sends {bytes_(sent[SCATTER])}, as much as averaging alone, and shards"
        " element by element. Both store all gradients on every rank: stage 2 shards them too, and"
        f" stage 3 also shards the parameters.{measured}",
        values,
        conclusion=why,
    )


def memory_figure(case: ShardingResult, known: tuple[str, ...]) -> Iterator[Figure]:
    shown = [strategy for strategy in known if case.by_rank("state", strategy)]
    if shown and case.ranks > 1:
        yield Figure(
            name=f"{case.record.study}-memory-{case.record.case}",
            title=f"Memory of a rank: {case.title}",
            kind="stacks",
            curves=curves(
                {kind: {w: (case.most(kind, w) or 0.0) / 2**20 for w in shown} for kind in KINDS}
            ),
            x_label="strategy",
            y_label="MiB",
            caption="Tensors after one step, on the rank with the most; without activations.",
        )


def strategies_table(
    name: str,
    title: str,
    known: Sequence[ShardingResult],
    strategies: Sequence[str],
    *,
    caption: str,
    time: Sequence[Declared] = (),
    memory: Sequence[Declared],
) -> Table:
    """Table with a row for each strategy of each case, plus columns `time` and `memory`."""
    return table(
        name,
        title,
        variant_rows(known, lambda _: strategies),
        [
            col("size", lambda r: r.of.case.size_name, key=True),
            col("ranks", lambda r: r.of.ranks, "count", key=True),
            col("strategy", lambda r: r.variant, key=True),
            step_column(),
            *time,
            *cols(
                KINDS,
                lambda r, kind: r.of.most(kind, r.variant),
                "bytes",
                hint="on the rank with the most",
            ),
            *memory,
            col(
                "sent, predicted",
                lambda r: r.of.moved(r.variant),
                "bytes",
                hint="per rank and step",
            ),
            col(
                "sent, counted",
                lambda r: r.of.most("sent", r.variant),
                "bytes",
                hint="from the collectives that were called",
            ),
            difference_column(),
        ],
        caption=caption,
    )


def _table(known: Sequence[ShardingResult]) -> Table:
    return strategies_table(
        "sharding-ways",
        "A step and its memory, with and without sharding",
        known,
        STRATEGIES,
        caption="Times of the slowest rank; all strategies are interleaved. Sent, predicted: an"
        " all-reduce sends 2(n-1)/n of the gradients, a reduce-scatter, an all-gather or a"
        " broadcast (n-1)/n.",
        time=[col("optimizer", lambda r: r.of.median("optimizer", r.variant), unit="ms")],
        memory=[
            col(
                "least state",
                lambda r: min(r.of.by_rank("state", r.variant), default=None),
                "bytes",
                hint="on the rank with the least",
            )
        ],
    )


def _stages(done: Sequence[ShardingResult]) -> Iterator[Table]:
    rows = [row for case in done if case.ranks > 1 for row in _stages_of(case)]
    if rows:
        yield table(
            "sharding-stages",
            "Memory of a rank by ZeRO stage",
            rows,
            [
                col("case", lambda r: r[0]),
                col("stage", lambda r: f"ZeRO {r[1]}" if r[1] else "none"),
                *cols(KINDS, lambda r, kind: r[2][kind], "bytes"),
                col("sum", lambda r: sum(r[2].values()), "bytes"),
                col("sent, predicted", lambda r: r[3], "bytes", hint="per rank and step"),
            ],
            caption="Computed from the unsharded bytes, without activations.",
        )


def _stages_of(case: ShardingResult) -> Iterator[tuple[str, int, dict[str, float], float]]:
    """Yield title, stage, bytes of each kind and bytes sent."""
    parts = {kind: case.by_rank(kind, UNSHARDED) for kind in KINDS}
    if not all(parts.values()):
        return
    for stage in range(4):
        # State is sharded first, then gradients, then parameters.
        sharded = KINDS[len(KINDS) - stage :]
        sizes = {k: part[0] / (case.ranks if k in sharded else 1) for k, part in parts.items()}
        # Gradients are reduced and parameters gathered; stage 3 gathers them twice.
        messages = (3 if stage == 3 else 2) * parts["parameters"][0]
        yield case.title, stage, sizes, messages * (case.ranks - 1) / case.ranks


class Station(NamedTuple):
    """Memory of a rank at one moment of its first steps: tensors, and counters of a GPU."""

    title: str
    strategy: str
    phase: str
    kinds: dict[str, float | None]
    counters: dict[str, float | None]

    @property
    def sum(self) -> float | None:
        sizes = [size for size in self.kinds.values() if size is not None]
        return sum(sizes) if len(sizes) == len(self.kinds) else None

    @property
    def is_known(self) -> bool:
        return any(size is not None for size in (*self.kinds.values(), *self.counters.values()))


def station_table(done: Sequence[ShardingResult], strategies: Sequence[str]) -> Iterator[Table]:
    """Memory after each phase; the driver's counter includes all processes."""
    rows = [
        station
        for case in done
        for strategy in strategies
        for phase in STATIONS
        if (station := _station(case, strategy, phase)).is_known
    ]
    if rows:
        counters = [
            counter
            for counter in COUNTERS
            if any(row.counters[counter] is not None for row in rows)
        ]
        on_gpu = (
            " `reserved` is what the allocator has reserved, in use or not; the driver's value"
            " includes every process on the GPU with its context and libraries. The peak is that of"
            " the second step. Each strategy starts with an empty allocator and with libraries"
            " loaded."
        )
        yield table(
            f"{done[0].record.study}-stations",
            "Memory of a rank after initialization, before and after the step",
            rows,
            [
                col("case", lambda r: r.title),
                col("strategy", lambda r: r.strategy),
                col("phase", lambda r: r.phase),
                *cols(KINDS, lambda r, kind: r.kinds[kind], "bytes"),
                col("sum", lambda r: r.sum, "bytes"),
                *cols(counters, lambda r, counter: r.counters[counter], "bytes"),
            ],
            caption="On the rank with the most, in its first steps; tensors are without activations"
            " and buffers. The first step creates the optimizer's state, so before a later one it"
            f" exists.{on_gpu * bool(counters)}",
        )


def _station(case: ShardingResult, strategy: str, phase: str) -> Station:
    # The bytes of each kind after the first step have no phase.
    of_kinds = "" if phase == AFTER_STEP else phase
    return Station(
        case.title,
        strategy,
        phase,
        {kind: case.most(kind, strategy, of_kinds) for kind in KINDS},
        {counter: case.most(counter, strategy, phase) for counter in COUNTERS},
    )
