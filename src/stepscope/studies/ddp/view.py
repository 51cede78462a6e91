"""Findings, figures and tables of data parallelism, from records alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.records.schema import Record
from stepscope.records.stats import Ratio, Summary, paired_ratio, ratio_interval, summarize
from stepscope.report.blocks import (
    Block,
    Cell,
    Column,
    Curve,
    Figure,
    Finding,
    Interval,
    Lane,
    Stretch,
    Table,
    Timeline,
    Tone,
)
from stepscope.report.format import bytes_, duration, number, percent
from stepscope.studies.ddp.ranks import ALONE, TORCH
from stepscope.studies.published_view import Mine, published_tables, ranked_step
from stepscope.studies.ranked import backend_of, rank_words

PHASES = ("forward", "backward", "waited", "optimizer")

Lanes = dict[str, dict[str, list[tuple[float, float, str]]]]
"""What a step did when, by strategy and lane: start, end, label."""


class Ways(NamedTuple):
    """One case: every way that was timed in it."""

    record: Record

    @property
    def names(self) -> list[str]:
        found = (s.variant for s in self.record.series if s.rank == 0)
        return list(dict.fromkeys(found))

    @property
    def title(self) -> str:
        config = self.record.config
        at = f" at context {config['context']}" if config["context"] else ""
        return (
            f"{config['size']}{at}, {rank_words(config['ranks'])},"
            f" {backend_of(self.record)}, {config.get('dtype', 'float32')}"
        )

    def of(self, way: str, phase: str, rank: int | None = None) -> Summary | None:
        """Of one rank, or of the slowest rank in each round."""
        held = [
            series.values
            for series in self.record.series
            if (series.variant, series.name) == (way, phase) and rank in (None, series.rank)
        ]
        return summarize([max(values) for values in zip(*held, strict=True)]) if held else None

    def median(self, way: str, phase: str) -> float | None:
        held = self.of(way, phase)
        return held.median if held else None

    def typical(self, way: str, phase: str) -> float | None:
        """In the round whose step is the median, of its slowest rank: phases add up to the step."""
        ranks = {
            s.rank: s.values for s in self.record.series if (s.variant, s.name) == (way, "step")
        }
        own = {s.rank: s.values for s in self.record.series if (s.variant, s.name) == (way, phase)}
        if not ranks or ranks.keys() != own.keys():
            return None
        slowest = [
            max((values[number], rank, number) for rank, values in ranks.items())
            for number in range(min(map(len, ranks.values())))
        ]
        _, rank, number = sorted(slowest)[(len(slowest) - 1) // 2]
        return own[rank][number]

    def waited(self, way: str) -> float | None:
        """Nothing is waited for after a backward that averages inside, or not at all."""
        return self.typical(way, "waited") if self.of(way, "slowest") else None

    def phases(self, way: str) -> tuple[float | None, ...]:
        return tuple(
            self.waited(way) if phase == "waited" else self.typical(way, phase) for phase in PHASES
        )

    def exposed(self, way: str) -> float | None:
        """What a step takes longer than one without communication."""
        step, alone = self.median(way, "step"), self.median(ALONE, "step")
        return step - alone if step is not None and alone is not None else None

    def samples(self, way: str) -> list[float]:
        held = [s.values for s in self.record.series if (s.variant, s.name) == (way, "step")]
        return [max(values) for values in zip(*held, strict=True)]


def ddp_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    done = [Ways(record) for record in records if record.status == "ok"]
    return (
        *(finding for ways in done for finding in _findings(ways)),
        *(figure for ways in done for figure in _pictures(ways)),
        _table(records, done),
        *_rank_table(done),
        *published_tables("ddp", [mine for ways in done for mine in _mine(ways)]),
    )


def _mine(ways: Ways) -> Iterator[Mine]:
    for way in ways.names:
        yield ranked_step(ways.record, way, ways.median(way, "step"))


def _findings(ways: Ways) -> Iterator[Finding]:
    ours = [name for name in ways.names if name not in (ALONE, TORCH)]
    steps = {name: held for name in ours if (held := ways.median(name, "step")) is not None}
    alone = ways.median(ALONE, "step")
    if not steps or alone is None:
        return
    # Below zero is noise: communication does not make a step faster.
    exposed = {name: max(0.0, ways.exposed(name) or 0.0) for name in steps}
    if ways.record.config["ranks"] == 1:
        cost = ", ".join(f"{duration(ms)} with {name}" for name, ms in exposed.items())
        yield Finding(
            text=f"{ways.title}: one rank has nobody to average with. What the wrappers cost shows:"
            f" a step takes {duration(alone)} without one and longer by {cost}."
        )
        yield from _against_torch(ways)
        return
    best = min(steps, key=lambda name: steps[name])
    size = ways.record.quantity("gradient_bytes") or 0.0
    # Rounds take turns, so those of two ways are pairs.
    alike = [
        name
        for name in steps
        if name != best and paired_ratio(ways.samples(best), ways.samples(name)).low <= 1
    ]
    rank = "takes the least," if alike else "is the fastest at"
    first = f"{best} {rank} {duration(steps[best])} a step"
    text = (
        f"{ways.title}: {first} for {bytes_(size)} of gradients; without communication it is"
        f" {duration(alone)}."
    )
    if alike:
        text += f" Not told from it: {', '.join(alike)}."
    if "naive" in steps and best != "naive":
        text += (
            f" Exposed: {duration(exposed[best])} of {best}, {duration(exposed['naive'])} of naive."
        )
    yield Finding(text=text)
    hidden = ways.median(best, "communication")
    if hidden and hidden > 0:
        share = min(1.0, 1 - exposed[best] / hidden)
        words = (
            f"{percent(share)} of that is hidden behind the backward."
            if share > 0
            else f"its step is longer by {duration(exposed[best])}, so nothing of that is hidden."
        )
        yield Finding(
            text=f"{ways.title}: the reductions of {best} take {duration(hidden)} on their own;"
            f" {words}"
        )
    yield from _against_torch(ways)


_OUTCOMES: dict[int, tuple[str, Tone]] = {
    -1: ("it is faster", "good"),
    0: ("no difference is shown", "info"),
    1: ("it is slower", "warn"),
}


def against_torch(ways: Ways) -> tuple[str, Ratio] | None:
    """The fastest bucketed strategy, and its step over that of torch's own wrapper."""
    buckets = [name for name in ways.names if name.startswith("bucketed")]
    if not buckets or not ways.samples(TORCH):
        return None
    best = min(buckets, key=lambda name: ways.median(name, "step") or 0.0)
    return best, ratio_interval(ways.samples(TORCH), ways.samples(best))


def _against_torch(ways: Ways) -> Iterator[Finding]:
    found = against_torch(ways)
    if found is None:
        return
    best, ratio = found
    outcome, tone = _OUTCOMES[(ratio.low > 1) - (ratio.high < 1)]
    yield Finding(
        code="ddp.against-torch",
        values={"strategy": best, "ratio": ratio.value, "low": ratio.low, "high": ratio.high},
        text=f"{ways.title}: {best} takes {number(ratio.value, 3)}× the step of torch's"
        f" DistributedDataParallel [{number(ratio.low, 3)}, {number(ratio.high, 3)}]: {outcome}.",
        tone=tone,
        records=(ways.record.id,),
    )


def _pictures(ways: Ways) -> Iterator[Figure | Timeline]:
    names = [name for name in ways.names if ways.of(name, "forward")]
    if not names:
        return
    yield Figure(
        name=f"ddp-phases-{ways.record.case}",
        title=f"Where a step goes: {ways.title}",
        kind="stacks",
        curves=tuple(
            Curve(
                label=phase,
                x=tuple(names),
                y=tuple(ways.phases(name)[place] or 0.0 for name in names),
            )
            for place, phase in enumerate(PHASES)
        ),
        x_label="way",
        y_label="ms",
        caption="The slowest rank in the round whose step is the median; `waited` is from the end"
        " of the backward until the gradients are averaged. torch's wrapper waits inside its"
        " backward.",
    )
    lanes = []
    steps = ways.record.attachment("timeline", Lanes) or {}
    for name, held in steps.items():
        for lane, stretches in held.items():
            if stretches:
                lanes.append(
                    Lane(
                        label=f"{name}: {lane}",
                        stretches=tuple(
                            Stretch(start=start, end=end, label=label,
                                    group=label if lane == "compute" else "reduction")
                            for start, end, label in _readable(stretches)
                        ),
                    )
                )  # fmt: skip
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


def _table(records: Sequence[Record], done: Sequence[Ways]) -> Table:
    known = {ways.record.id: ways for ways in done}
    rows: list[tuple[Cell, ...]] = []
    for record in records:
        config = record.config
        head: tuple[Cell, ...] = (
            config["size"], config["context"] or None, config["ranks"],
            config.get("dtype", "float32"),
        )  # fmt: skip
        if record.id not in known:
            rows.append((*head, None, record.status, *(None,) * 7))
            continue
        ways = known[record.id]
        for name in ways.names:
            step = ways.of(name, "step")
            rows.append(
                (
                    *head,
                    name,
                    Interval(value=step.median, low=step.low, high=step.high) if step else None,
                    *ways.phases(name),
                    ways.median(name, "communication"),
                    None if name == ALONE else ways.exposed(name),
                    record.quantity("reductions", variant=name),
                )
            )
    return Table(
        name="ddp-steps",
        title="A step with each way to average gradients",
        columns=(
            Column(title="size"),
            Column(title="context", kind="count"),
            Column(title="ranks", kind="count"),
            Column(title="dtype"),
            Column(title="way"),
            Column(title="step", kind="number", unit="ms", hint="median with its 95 % interval"),
            *(Column(title=phase, kind="number", unit="ms") for phase in PHASES),
            Column(
                title="communication", kind="number", unit="ms",
                hint="its reductions with nothing to hide behind",
            ),
            Column(
                title="exposed", kind="number", unit="ms",
                hint="step minus the step without communication",
            ),
            Column(title="reductions", kind="count"),
        ),
        rows=tuple(rows),
        caption="Steps of the slowest rank in each round; all ways take turns in the same ranks."
        " Phases are those of the round whose step is the median.",
    )  # fmt: skip


def _rank_table(done: Sequence[Ways]) -> Iterator[Table]:
    rows: list[tuple[Cell, ...]] = []
    for ways in done:
        for name in ways.names:
            for rank in range(ways.record.config["ranks"]):
                slowest, transfer = ways.of(name, "slowest", rank), ways.of(name, "transfer", rank)
                if slowest and transfer:
                    rows.append((ways.title, name, rank, slowest.median, transfer.median))
    if rows:
        yield Table(
            name="ddp-waits",
            title="What each rank waits for",
            columns=(
                Column(title="case"),
                Column(title="way"),
                Column(title="rank", kind="count"),
                Column(title="slowest rank", kind="number", unit="ms"),
                Column(title="transfer", kind="number", unit="ms"),
            ),
            rows=tuple(rows),
            caption="At the end of the backward: until the last rank has arrived, and from then"
            " until its gradients are there.",
        )
