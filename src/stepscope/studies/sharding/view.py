"""Findings, figures and tables of the sharded optimizer; `fsdp` shares its rows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.stats import ratio_interval
from stepscope.report.blocks import Block, Curve, Figure, Finding, Table, Tone, Value
from stepscope.report.format import bytes_, number, percent
from stepscope.report.tables import Declared, col, cols, table
from stepscope.studies.base import Result
from stepscope.studies.ranks.results import RankedResult, step_column, strategy_rows
from stepscope.studies.ranks.subject import RankedStep
from stepscope.studies.sharding.cases import BROADCAST, SCATTER, TORCH, WAYS, WHOLE
from stepscope.studies.views.published import published_tables, ranked_step

KINDS = ("parameters", "gradients", "state")
AFTER_STEP = "after step"
STATIONS = ("after model", "after forward", "after backward", AFTER_STEP, "peak")
COUNTERS = ("allocated", "reserved", "driver")


class Divided(RankedResult[RankedStep]):
    """One case: what each way holds and takes."""

    @property
    def ranks(self) -> int:
        return self.case.ranks

    @property
    def title(self) -> str:
        return f"{self.case.size}, {self.place}"

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

    def moved(self, way: str) -> float | None:
        size = self.held(WHOLE, "parameters")
        return moved(way, size[0], self.ranks) if size else None

    def ratio_finding(
        self, what: str, ours: str, theirs: str, words: str, *, judged: bool = False
    ) -> Iterator[Finding]:
        """Our step over theirs; `words` has a place for the ratio."""
        base, mine = self.samples("step", theirs), self.samples("step", ours)
        if base and mine:
            ratio = ratio_interval(base, mine)
            better: Tone = "good" if ratio.high <= 1 else "warn" if ratio.low > 1 else "info"
            yield self.finding(
                what,
                words.format(f"{number(ratio.value, 3)}×")
                + f" [{number(ratio.low, 3)}, {number(ratio.high, 3)}].",
                {"ratio": ratio.value, "low": ratio.low, "high": ratio.high},
                tone=better if judged else "info",
            )


def moved(way: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends in a step for parameters of that size, by the best algorithms.

    Fully sharded, every matrix is gathered twice and reduced once.
    """
    return (2 if way in (WHOLE, SCATTER) else 3) * size * (ranks - 1) / ranks


def sharding_blocks(results: Sequence[Result[RankedStep]]) -> tuple[Block, ...]:
    known = [Divided(*result) for result in results]
    done = [case for case in known if case.record.status == "ok"]
    steps = [
        ranked_step(*case, way, step)
        for case in done
        for way in WAYS
        if (step := case.median("step", way)) is not None
    ]
    return (
        *(finding for case in done for finding in _findings(case)),
        *(figure for case in done for figure in memory_figure(case, WAYS)),
        _table(known),
        *_stages(done),
        *station_table(done, WAYS),
        *published_tables("sharding", steps),
    )


def _findings(case: Divided) -> Iterator[Finding]:
    yield from alone_finding(case) if case.ranks == 1 else _shares(case)
    yield from case.ratio_finding(
        "against-torch",
        BROADCAST,
        TORCH,
        "a step takes {} that with torch's ZeroRedundancyOptimizer",
        judged=True,
    )
    yield from counter_finding(case, BROADCAST)
    yield from refused_findings(case, WAYS)


def alone_finding(case: Divided) -> Iterator[Finding]:
    text = "one rank has nobody to share with; only the cost of the wrappers shows."
    yield case.finding("one-rank", text, {})


def refused_findings(case: Divided, ways: Sequence[str]) -> Iterator[Finding]:
    refused = case.record.attachment("refused", dict[str, str]) or {}
    for way in ways:
        if reason := refused.get(way):
            values = {"way": way, "reason": reason}
            yield case.finding("refused", f"{way} does not run here: {reason}", values, tone="warn")


def counter_finding(case: Divided, way: str) -> Iterator[Finding]:
    """After a step, by three counters: they need not agree on whether sharding saves."""
    pairs = {
        counter: [case.most(one, counter, AFTER_STEP) for one in (WHOLE, way)]
        for counter in COUNTERS
    }
    found = {name: (a, b) for name, (a, b) in pairs.items() if a is not None and b is not None}
    if len(found) < len(COUNTERS):
        return
    words = {name: f"{bytes_(whole)} and {bytes_(ours)}" for name, (whole, ours) in found.items()}
    rises = {name: ours - whole for name, (whole, ours) in found.items()}
    yield case.finding(
        "counters",
        f"after a step, unsharded and {way}, a rank has allocated {words['allocated']}; its"
        f" allocator has reserved {words['reserved']}; the driver shows {words['driver']} for all"
        " processes on the GPU.",
        {
            f"{name} {one}": size
            for name, sizes in found.items()
            for one, size in zip((WHOLE, way), sizes, strict=True)
        },
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
    yield case.finding(
        "share",
        f"AdamW's state takes {bytes_(whole[0])} on every rank unsharded and {bytes_(max(ours))} at"
        f" most when parameters are shared out by bytes: {percent(off)} off an equal share.",
        {"whole_bytes": whole[0], "most_bytes": max(ours), "off": off},
        tone="good" if off <= 0.02 else "info",
    )
    yield _difference(case)


def _difference(case: Divided) -> Finding:
    """From stage 1 of ZeRO, in bytes moved, memory and time."""
    sent = {way: case.moved(way) or 0.0 for way in (BROADCAST, SCATTER)}
    values: dict[str, Value] = {f"moved {way}": size for way, size in sent.items()}
    measured = ""
    owned, cut = case.samples("step", BROADCAST), case.samples("step", SCATTER)
    if owned and cut:
        ratio = ratio_interval(owned, cut)
        values |= {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
        words = ", and gloo makes a reduce-scatter of an all-reduce" * (case.backend == "gloo")
        measured = (
            f"Here its step takes {number(ratio.value, 3)}× as long [{number(ratio.low, 3)},"
            f" {number(ratio.high, 3)}]: its reduction begins after the backward, the other's runs"
            f" beside it{words}. "
        )
    return case.finding(
        "stage-1",
        "averaging all gradients and then sending the parameters from their owners moves"
        f" {bytes_(sent[BROADCAST])} per rank and step; ZeRO stage 1 proper (reduce-scatter, then"
        f" all-gather) moves {bytes_(sent[SCATTER])}, as much as averaging alone, and divides to"
        " the element.",
        values,
        conclusion=f"{measured}Both keep all gradients: stage 2 would keep a share of them, stage 3"
        " a share of the parameters too.",
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


def strategies_table(
    name: str,
    title: str,
    known: Sequence[Divided],
    ways: Sequence[str],
    *,
    caption: str,
    time: Sequence[Declared] = (),
    memory: Sequence[Declared],
) -> Table:
    """A row for each way of each case; `time` and `memory` are columns after those of both."""
    return table(
        name,
        title,
        strategy_rows(known, lambda _: ways),
        [
            col("size", lambda r: r.of.case.size, key=True),
            col("ranks", lambda r: r.of.ranks, "count", key=True),
            col("way", lambda r: r.way, key=True),
            step_column(),
            *time,
            *cols(
                KINDS, lambda r, kind: r.of.most(r.way, kind), "bytes", hint="on the rank with most"
            ),
            *memory,
            col("moved", lambda r: r.of.moved(r.way), "bytes", hint="per rank and step, predicted"),
            col(
                "counted",
                lambda r: r.of.most(r.way, "sent"),
                "bytes",
                hint="of the collectives that were called",
            ),
        ],
        caption=caption,
    )


def _table(known: Sequence[Divided]) -> Table:
    return strategies_table(
        "sharding-ways",
        "A step and its memory, with and without sharding",
        known,
        WAYS,
        caption="Times of the slowest rank; all ways take turns. Moved: an all-reduce is 2(n-1)/n"
        " of the gradients, a reduce-scatter, an all-gather or a broadcast (n-1)/n.",
        time=[col("optimizer", lambda r: r.of.median("optimizer", r.way), unit="ms")],
        memory=[
            col(
                "least state",
                lambda r: min(r.of.held(r.way, "state"), default=None),
                "bytes",
                hint="on the rank with least",
            )
        ],
    )


def _stages(done: Sequence[Divided]) -> Iterator[Table]:
    rows = [row for case in done if case.ranks > 1 for row in _stages_of(case)]
    if rows:
        yield table(
            "sharding-stages",
            "What each stage of ZeRO leaves on a rank",
            rows,
            [
                col("case", lambda r: r[0]),
                col("stage", lambda r: f"ZeRO {r[1]}" if r[1] else "none"),
                *cols(KINDS, lambda r, kind: r[2][kind], "bytes"),
                col("sum", lambda r: sum(r[2].values()), "bytes"),
                col("moved", lambda r: r[3], "bytes", hint="per rank and step, predicted"),
            ],
            caption="From the unsharded bytes; activations come on top.",
        )


def _stages_of(case: Divided) -> Iterator[tuple[str, int, dict[str, float], float]]:
    """Title, stage, bytes left of each kind, bytes moved."""
    parts = {kind: case.held(WHOLE, kind) for kind in KINDS}
    if not all(parts.values()):
        return
    for stage in range(4):
        # State is divided first, then gradients, then parameters.
        divided = KINDS[len(KINDS) - stage :]
        sizes = {k: held[0] / (case.ranks if k in divided else 1) for k, held in parts.items()}
        # Gradients are reduced and parameters gathered; stage 3 gathers them twice.
        messages = (3 if stage == 3 else 2) * parts["parameters"][0]
        yield case.title, stage, sizes, messages * (case.ranks - 1) / case.ranks


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
