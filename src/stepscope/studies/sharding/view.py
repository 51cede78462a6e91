"""Findings, figures and tables of the sharded optimizer; `fsdp` shares its rows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.records.schema import Record
from stepscope.records.stats import ratio_interval
from stepscope.report.blocks import Block, Curve, Figure, Finding, Table, Value
from stepscope.report.format import bytes_, number, percent
from stepscope.report.tables import Declared, col, cols, interval, table
from stepscope.studies.base import Result
from stepscope.studies.published_view import published_tables, ranked_step
from stepscope.studies.rank_subject import RankedStep
from stepscope.studies.ranked import backend_of, rank_words, slowest, slowest_summary
from stepscope.studies.sharding.cases import BROADCAST, SCATTER, TORCH, WAYS, WHOLE

KINDS = ("parameters", "gradients", "state")
AFTER_STEP = "after step"
STATIONS = ("after model", "after forward", "after backward", AFTER_STEP, "peak")
COUNTERS = ("allocated", "reserved", "driver")


class Divided(Result[RankedStep]):
    """One case: what each way holds and takes."""

    @property
    def ranks(self) -> int:
        return self.case.ranks

    @property
    def backend(self) -> str:
        return backend_of(self.record, self.case)

    @property
    def title(self) -> str:
        return f"{self.case.size}, {rank_words(self.ranks)}, {self.backend}"

    def held(self, way: str, kind: str, phase: str = "") -> list[float]:
        """Bytes of that kind on each rank, after a phase where one is named."""
        found = (
            self.record.quantity(kind, variant=way, phase=phase, rank=rank)
            for rank in range(self.ranks)
        )
        return [value for value in found if value is not None]

    def most(self, way: str, kind: str, phase: str = "") -> float | None:
        """On the rank with most."""
        return max(self.held(way, kind, phase), default=None)

    def sums(self, way: str) -> list[float]:
        """Parameters, gradients and state on each rank; empty where one was not counted."""
        held = [self.held(way, kind) for kind in KINDS]
        complete = all(len(values) == self.ranks for values in held)
        return [sum(parts) for parts in zip(*held, strict=True)] if complete else []

    def samples(self, way: str) -> list[float]:
        """Steps of the slowest rank in each round."""
        return slowest(self.record, "step", variant=way)

    def moved(self, way: str) -> float | None:
        size = self.held(WHOLE, "parameters")
        return moved(way, size[0], self.ranks) if size else None


class Row(NamedTuple):
    """A way of a case; a failed case has one row without any."""

    record: Record
    case: Divided
    way: str | None


def moved(way: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends in a step for parameters of that size, by the best algorithms.

    Fully sharded, every matrix is gathered twice and reduced once.
    """
    return (2 if way in (WHOLE, SCATTER) else 3) * size * (ranks - 1) / ranks


def sharding_blocks(results: Sequence[Result[RankedStep]]) -> tuple[Block, ...]:
    known = [Divided(*result) for result in results]
    done = [case for case in known if case.record.status == "ok"]
    return (
        *(finding for case in done for finding in _findings(case)),
        *(figure for case in done for figure in memory_figure(case, WAYS)),
        _table(known),
        *_stages(done),
        *station_table(done, WAYS),
        *published_tables(
            "sharding",
            [
                ranked_step(*case, way, step.median)
                for case in done
                for way in WAYS
                if (step := slowest_summary(case.record, "step", variant=way)) is not None
            ],
        ),
    )


def _findings(case: Divided) -> Iterator[Finding]:
    yield from alone_finding(case) if case.ranks == 1 else _shares(case)
    yield from _against_torch(case)
    yield from counter_finding(case, BROADCAST)
    yield from refused_findings(case, WAYS)


def alone_finding(case: Divided) -> Iterator[Finding]:
    yield Finding(
        code=f"{case.record.study}.one-rank",
        records=(case.record.id,),
        text=f"{case.title}: one rank has nobody to share with; only the cost of the wrappers"
        " shows.",
    )


def refused_findings(case: Divided, ways: Sequence[str]) -> Iterator[Finding]:
    refused = case.record.attachment("refused", dict[str, str]) or {}
    for way in ways:
        if reason := refused.get(way):
            yield Finding(
                code=f"{case.record.study}.refused",
                values={"way": way, "reason": reason},
                records=(case.record.id,),
                text=f"{case.title}: {way} does not run here: {reason}",
                tone="warn",
            )


def counter_finding(case: Divided, way: str) -> Iterator[Finding]:
    """After a step, by three counters: they need not agree on whether sharding saves."""
    values: dict[str, Value] = {}
    words, rises = {}, {}
    for counter in COUNTERS:
        whole, ours = case.most(WHOLE, counter, AFTER_STEP), case.most(way, counter, AFTER_STEP)
        if whole is None or ours is None:
            return
        values |= {f"{counter} {WHOLE}": whole, f"{counter} {way}": ours}
        words[counter] = f"{bytes_(whole)} and {bytes_(ours)}"
        rises[counter] = ours - whole
    yield Finding(
        code=f"{case.record.study}.counters",
        values=values,
        records=(case.record.id,),
        text=f"{case.title}: after a step, unsharded and {way}, a rank has allocated"
        f" {words['allocated']}; its allocator has reserved {words['reserved']}; the driver shows"
        f" {words['driver']} for all processes on the GPU.",
        conclusion="The driver's figure goes up where less is allocated: it has what the allocator"
        " keeps for later and what libraries take, not what is in use."
        if rises["driver"] > 0 > rises["allocated"]
        else "",
    )


def _shares(case: Divided) -> Iterator[Finding]:
    whole, ours = case.held(WHOLE, "state"), case.held(BROADCAST, "state")
    if not (whole and ours and case.held(WHOLE, "parameters")):
        return
    ideal = whole[0] / case.ranks
    off = max(abs(share - ideal) for share in ours) / ideal if ideal else 0.0
    yield Finding(
        code="sharding.share",
        values={"whole_bytes": whole[0], "most_bytes": max(ours), "off": off},
        records=(case.record.id,),
        text=f"{case.title}: AdamW's state takes {bytes_(whole[0])} on every rank unsharded and"
        f" {bytes_(max(ours))} at most when parameters are shared out by bytes:"
        f" {percent(off)} off an equal share.",
        tone="good" if off <= 0.02 else "info",
    )
    yield _difference(case)


def _difference(case: Divided) -> Finding:
    """From stage 1 of ZeRO, in bytes moved, memory and time."""
    sent = {way: case.moved(way) or 0.0 for way in (BROADCAST, SCATTER)}
    values: dict[str, Value] = {f"moved {way}": size for way, size in sent.items()}
    measured = ""
    owned, cut = case.samples(BROADCAST), case.samples(SCATTER)
    if owned and cut:
        ratio = ratio_interval(owned, cut)
        values |= {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
        words = ", and gloo makes a reduce-scatter of an all-reduce" * (case.backend == "gloo")
        measured = (
            f"Here its step takes {number(ratio.value, 3)}× as long [{number(ratio.low, 3)},"
            f" {number(ratio.high, 3)}]: its reduction begins after the backward, the other's runs"
            f" beside it{words}. "
        )
    return Finding(
        code="sharding.stage-1",
        values=values,
        records=(case.record.id,),
        text=f"{case.title}: averaging all gradients and then sending the parameters from their"
        f" owners moves {bytes_(sent[BROADCAST])} per rank and step; ZeRO stage 1 proper"
        f" (reduce-scatter, then all-gather) moves {bytes_(sent[SCATTER])}, as much as averaging"
        " alone, and divides to the element.",
        conclusion=f"{measured}Both keep all gradients: stage 2 would keep a share of them, stage 3"
        " a share of the parameters too.",
    )


def _against_torch(case: Divided) -> Iterator[Finding]:
    theirs, mine = case.samples(TORCH), case.samples(BROADCAST)
    if theirs and mine:
        ratio = ratio_interval(theirs, mine)
        yield Finding(
            code="sharding.against-torch",
            values={"ratio": ratio.value, "low": ratio.low, "high": ratio.high},
            records=(case.record.id,),
            text=f"{case.title}: a step takes {number(ratio.value, 3)}× that with torch's"
            f" ZeroRedundancyOptimizer [{number(ratio.low, 3)}, {number(ratio.high, 3)}].",
            tone="good" if ratio.high <= 1 else "warn" if ratio.low > 1 else "info",
        )


def memory_figure(case: Divided, known: tuple[str, ...]) -> Iterator[Figure]:
    ways = tuple(way for way in known if case.held(way, "state"))
    if ways and case.ranks > 1:
        yield Figure(
            name=f"{case.record.study}-memory-{case.record.case}",
            title=f"What a rank holds: {case.title}",
            kind="stacks",
            curves=tuple(
                Curve(
                    label=kind, x=ways, y=tuple((case.most(w, kind) or 0.0) / 2**20 for w in ways)
                )
                for kind in KINDS
            ),
            x_label="way",
            y_label="MiB",
            caption="Tensors after one step, on the rank that holds most; activations are gone.",
        )


def ways_table(
    name: str, title: str, known: Sequence[Divided], ways: Sequence[str], *, caption: str,
    time: Sequence[Declared] = (), memory: Sequence[Declared],
) -> Table:  # fmt: skip
    """A row for each way of each case; `time` and `memory` are columns after those of both."""
    return table(
        name,
        title,
        [
            Row(case.record, case, way)
            for case in known
            for way in (ways if case.record.status == "ok" else [None])
        ],
        [
            col("size", lambda r: r.case.case.size, key=True),
            col("ranks", lambda r: r.case.ranks, "count", key=True),
            col("way", lambda r: r.way, key=True),
            col(
                "step",
                lambda r: interval(slowest_summary(r.record, "step", variant=r.way)),
                unit="ms",
                hint="median with its 95 % interval",
            ),
            *time,
            *cols(
                KINDS,
                lambda r, kind: r.case.most(r.way, kind),
                "bytes",
                hint="on the rank with most",
            ),
            *memory,
            col(
                "moved",
                lambda r: r.case.moved(r.way),
                "bytes",
                hint="per rank and step, predicted",
            ),
            col(
                "counted",
                lambda r: r.case.most(r.way, "sent"),
                "bytes",
                hint="of the collectives that were called",
            ),
        ],
        caption=caption,
    )


def _table(known: Sequence[Divided]) -> Table:
    def optimizer(row: Row) -> float | None:
        summary = slowest_summary(row.record, "optimizer", variant=row.way or "")
        return summary.median if summary else None

    return ways_table(
        "sharding-ways",
        "A step and its memory, with and without sharding",
        known,
        WAYS,
        caption="Times of the slowest rank; all ways take turns. Moved: an all-reduce is 2(n-1)/n"
        " of the gradients, a reduce-scatter, an all-gather or a broadcast (n-1)/n.",
        time=[col("optimizer", optimizer, unit="ms")],
        memory=[
            col(
                "least state",
                lambda r: min(r.case.held(r.way, "state"), default=None),
                "bytes",
                hint="on the rank with least",
            )
        ],
    )


class Stage(NamedTuple):
    """What is left on a rank by a stage of ZeRO."""

    case: str
    name: str
    sizes: dict[str, float]
    moved: float


def _stages(done: Sequence[Divided]) -> Iterator[Table]:
    rows = [stage for case in done if case.ranks > 1 for stage in _stages_of(case)]
    if rows:
        yield table(
            "sharding-stages",
            "What each stage of ZeRO leaves on a rank",
            rows,
            [
                col("case", lambda r: r.case),
                col("stage", lambda r: r.name),
                *cols(KINDS, lambda r, kind: r.sizes[kind], "bytes"),
                col("sum", lambda r: sum(r.sizes.values()), "bytes"),
                col("moved", lambda r: r.moved, "bytes", hint="per rank and step, predicted"),
            ],
            caption="From the unsharded bytes; activations come on top.",
        )


def _stages_of(case: Divided) -> Iterator[Stage]:
    parts = {kind: case.held(WHOLE, kind) for kind in KINDS}
    if not all(parts.values()):
        return
    ranks, whole = case.ranks, {kind: held[0] for kind, held in parts.items()}
    for stage in range(4):
        # State first, then gradients, then parameters.
        divided = KINDS[len(KINDS) - stage :]
        sizes = {kind: s / ranks if kind in divided else s for kind, s in whole.items()}
        # Gradients are reduced and parameters gathered; stage 3 gathers them twice.
        moves = (3 if stage == 3 else 2) * whole["parameters"] * (ranks - 1) / ranks
        yield Stage(case.title, f"ZeRO {stage}" if stage else "none", sizes, moves)


def station_table(done: Sequence[Divided], ways: Sequence[str]) -> Iterator[Table]:
    """A GPU's counters through a step; the driver's includes all processes on it."""
    rows = [
        (case.title, way, station, {one: case.most(way, one, station) for one in COUNTERS})
        for case in done
        for way in ways
        for station in STATIONS
        if any(case.held(way, counter, station) for counter in COUNTERS)
    ]
    if rows:
        yield table(
            f"{done[0].record.study}-stations",
            "A GPU's memory through a step",
            rows,
            [
                col("case", lambda r: r[0]),
                col("way", lambda r: r[1]),
                col("station", lambda r: r[2]),
                *cols(COUNTERS, lambda r, counter: r[3][counter], "bytes"),
            ],
            caption="On the rank with most, through its first step; the peak is that of the second."
            " `reserved` is what the allocator holds, freed or not. The driver's figure has every"
            " process on the GPU, their contexts and libraries. Each way starts with an empty"
            " allocator and with libraries loaded.",
        )
