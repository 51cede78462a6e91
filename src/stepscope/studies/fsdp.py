"""What does fully sharded data parallelism save, and what does it cost?

    stepscope run fsdp --size small --context 128 --ranks 2

As in `sharding`, each way first runs alone and its tensors are counted; then all take turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.records.schema import Environment, Record
from stepscope.records.stats import ratio_interval
from stepscope.report.blocks import Block, Cell, Column, Finding, Interval, Table
from stepscope.report.format import bytes_, number, percent
from stepscope.studies.base import Bench, Measurement, PlannedCase, Study
from stepscope.studies.sharding import STUDY as SHARDING
from stepscope.studies.sharding import ShardingFlags, measure_on_ranks
from stepscope.studies.sharding.memory_view import (
    KINDS,
    Divided,
    alone_finding,
    counter_finding,
    memory_figure,
    refused_findings,
    station_table,
)
from stepscope.studies.sharding.ranks import FULLY, FULLY_WAYS, TORCH_FULLY, WHOLE

CLOSE = 0.05
"""How far from an equal share the memory may be: small parameters are on every rank."""


class FullySharded(Study[ShardingFlags, Any]):
    name = "fsdp"
    title = "Fully sharded data parallelism"
    question = "What does sharding parameters, gradients and state save, and what does it cost?"
    examples = ("stepscope run fsdp --size small --ranks 2",)
    flags = ShardingFlags

    def cases(self, flags: ShardingFlags) -> tuple[PlannedCase, ...]:
        return tuple(
            PlannedCase(study=self.name, key=case.key, config=case.config)
            for case in SHARDING.cases(flags)
        )

    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        return measure_on_ranks(self.name, config, bench, FULLY_WAYS)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        done = [Divided(record) for record in records if record.status == "ok"]
        return (
            *(finding for case in done for finding in _findings(case)),
            *(figure for case in done for figure in memory_figure(case, FULLY_WAYS)),
            _table(records, done),
            *station_table(done, FULLY_WAYS),
        )

    def presets(self, environment: Environment) -> Mapping[str, Sequence[ShardingFlags]]:
        return SHARDING.presets(environment)


STUDY = FullySharded()


def _sum(case: Divided, way: str) -> list[float]:
    """Parameters, gradients and state on each rank."""
    held = [case.held(way, kind) for kind in KINDS]
    complete = all(len(values) == case.ranks for values in held)
    return [sum(parts) for parts in zip(*held, strict=True)] if complete else []


def moved(way: str, case: Divided) -> float | None:
    """Bytes that a rank sends in a step, if every matrix is gathered twice and reduced once."""
    size = case.held(WHOLE, "parameters")
    part = (case.ranks - 1) / case.ranks
    return (2 if way == WHOLE else 3) * part * size[0] if size else None


def _findings(case: Divided) -> Iterator[Finding]:
    yield from alone_finding(case) if case.ranks == 1 else _shares(case)
    yield from _times(case)
    yield from counter_finding(case, FULLY)
    yield from refused_findings(case, FULLY_WAYS)


def _shares(case: Divided) -> Iterator[Finding]:
    whole, ours = _sum(case, WHOLE), _sum(case, FULLY)
    if not (whole and ours):
        return
    ideal = whole[0] / case.ranks
    off = max(ours) / ideal - 1
    yield Finding(
        text=f"{case.title}: parameters, gradients and state take {bytes_(whole[0])} on every rank"
        f" unsharded and {bytes_(max(ours))} at most fully sharded, {percent(off)} above an equal"
        " share.",
        tone="good" if off <= CLOSE else "warn",
    )


def _times(case: Divided) -> Iterator[Finding]:
    for other, words in (
        (WHOLE, "an unsharded one"),
        (TORCH_FULLY, "one with torch's fully_shard"),
    ):
        theirs, mine = case.samples(other, "step"), case.samples(FULLY, "step")
        if theirs and mine:
            ratio = ratio_interval(theirs, mine)
            yield Finding(
                text=f"{case.title}: a fully sharded step takes {number(ratio.value, 3)}× {words}"
                f" [{number(ratio.low, 3)}, {number(ratio.high, 3)}]."
            )


def _table(records: Sequence[Record], done: Sequence[Divided]) -> Table:
    known = {case.record.id: case for case in done}
    rows: list[tuple[Cell, ...]] = []
    for record in records:
        head: tuple[Cell, ...] = (record.config["size"], record.config["ranks"])
        if record.id not in known:
            rows.append((*head, None, record.status, *(None,) * 6))
            continue
        case = known[record.id]
        for way in FULLY_WAYS:
            step = case.of(way, "step")
            rows.append(
                (
                    *head,
                    way,
                    Interval(value=step.median, low=step.low, high=step.high) if step else None,
                    *(max(case.held(way, kind), default=None) for kind in KINDS),
                    max(_sum(case, way), default=None),
                    moved(way, case),
                    max(case.held(way, "sent"), default=None),
                )
            )
    return Table(
        name="fsdp-ways",
        title="A step and its memory, fully sharded and not",
        columns=(
            Column(title="size"),
            Column(title="ranks", kind="count"),
            Column(title="way"),
            Column(title="step", kind="number", unit="ms", hint="median with its 95 % interval"),
            *(Column(title=kind, kind="bytes", hint="on the rank with most") for kind in KINDS),
            Column(title="sum", kind="bytes"),
            Column(title="moved", kind="bytes", hint="per rank and step, predicted"),
            Column(title="counted", kind="bytes", hint="of the collectives that were called"),
        ),
        rows=tuple(rows),
        caption="Times of the slowest rank; all ways take turns. Bytes are what a rank keeps"
        " between steps; while a layer runs, its whole weights come on top. Moved: gathered for the"
        " forward and again for the backward, and reduced. What is not let go of between them"
        " (torch's outermost weights) is gathered once.",
    )
