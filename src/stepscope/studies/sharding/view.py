"""Findings and tables of the sharded optimizer, from records alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.schema import Record
from stepscope.records.stats import ratio_interval
from stepscope.report.blocks import Block, Cell, Column, Finding, Interval, Table
from stepscope.report.format import bytes_, number, percent
from stepscope.studies.published_view import published_tables, ranked_step
from stepscope.studies.sharding.memory_view import (
    KINDS,
    Divided,
    alone_finding,
    counter_finding,
    memory_figure,
    refused_findings,
    station_table,
)
from stepscope.studies.sharding.ranks import BROADCAST, SCATTER, TORCH, WAYS, WHOLE


def moved(way: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends in a step for parameters of that size, by the best algorithms."""
    part = size * (ranks - 1) / ranks
    return {WHOLE: 2 * part, SCATTER: 2 * part}.get(way, 3 * part)


def sharding_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    done = [Divided(record) for record in records if record.status == "ok"]
    return (
        *(finding for case in done for finding in _findings(case)),
        *(figure for case in done for figure in memory_figure(case, WAYS)),
        _table(records, done),
        *_stages(done),
        *station_table(done, WAYS),
        *published_tables(
            "sharding",
            [
                ranked_step(case.record, way, held.median)
                for case in done
                for way in WAYS
                if (held := case.of(way, "step")) is not None
            ],
        ),
    )


def _findings(case: Divided) -> Iterator[Finding]:
    yield from alone_finding(case) if case.ranks == 1 else _shares(case)
    yield from _against_torch(case)
    yield from counter_finding(case, BROADCAST)
    yield from refused_findings(case, WAYS)


def _shares(case: Divided) -> Iterator[Finding]:
    whole, ours = case.held(WHOLE, "state"), case.held(BROADCAST, "state")
    size = case.held(WHOLE, "parameters")
    if not (whole and ours and size):
        return
    ideal = whole[0] / case.ranks
    off = max(abs(share - ideal) for share in ours) / ideal if ideal else 0.0
    yield Finding(
        text=f"{case.title}: AdamW's state takes {bytes_(whole[0])} on every rank unsharded and"
        f" {bytes_(max(ours))} at most when parameters are shared out by bytes:"
        f" {percent(off)} off an equal share.",
        tone="good" if off <= 0.02 else "info",
    )
    yield Finding(text=f"{case.title}: {_difference(case, size[0])}")


def _against_torch(case: Divided) -> Iterator[Finding]:
    theirs, mine = case.samples(TORCH, "step"), case.samples(BROADCAST, "step")
    if theirs and mine:
        ratio = ratio_interval(theirs, mine)
        yield Finding(
            text=f"{case.title}: a step takes {number(ratio.value, 3)}× that with torch's"
            f" ZeroRedundancyOptimizer [{number(ratio.low, 3)}, {number(ratio.high, 3)}].",
            tone="good" if ratio.high <= 1 else "warn" if ratio.low > 1 else "info",
        )


def _difference(case: Divided, size: float) -> str:
    """From stage 1 of ZeRO, in bytes moved, memory and time."""
    sent = {way: moved(way, size, case.ranks) for way in (BROADCAST, SCATTER)}
    text = (
        "averaging all gradients and then sending the parameters from their owners moves"
        f" {bytes_(sent[BROADCAST])} per rank and step; ZeRO stage 1 proper (reduce-scatter, then"
        f" all-gather) moves {bytes_(sent[SCATTER])}, as much as averaging alone, and divides to"
        " the element."
    )
    owned, cut = case.samples(BROADCAST, "step"), case.samples(SCATTER, "step")
    if owned and cut:
        ratio = ratio_interval(owned, cut)
        words = ", and gloo makes a reduce-scatter of an all-reduce" * (case.backend == "gloo")
        text += (
            f" Here its step takes {number(ratio.value, 3)}× as long [{number(ratio.low, 3)},"
            f" {number(ratio.high, 3)}]: its reduction begins after the backward, the other's runs"
            f" beside it{words}."
        )
    return text + (
        " Both keep all gradients: stage 2 would keep a share of them, stage 3 a share of the"
        " parameters too."
    )


def _table(records: Sequence[Record], done: Sequence[Divided]) -> Table:
    known = {case.record.id: case for case in done}
    rows: list[tuple[Cell, ...]] = []
    for record in records:
        head: tuple[Cell, ...] = (record.config["size"], record.config["ranks"])
        if record.id not in known:
            rows.append((*head, None, record.status, *(None,) * 7))
            continue
        case = known[record.id]
        for way in WAYS:
            step, optimizer = case.of(way, "step"), case.of(way, "optimizer")
            size = case.held(WHOLE, "parameters")
            rows.append(
                (
                    *head,
                    way,
                    Interval(value=step.median, low=step.low, high=step.high) if step else None,
                    optimizer.median if optimizer else None,
                    *(max(case.held(way, kind), default=None) for kind in KINDS),
                    min(case.held(way, "state"), default=None),
                    moved(way, size[0], case.ranks) if size else None,
                    max(case.held(way, "sent"), default=None),
                )
            )
    return Table(
        name="sharding-ways",
        title="A step and its memory, with and without sharding",
        columns=(
            Column(title="size"),
            Column(title="ranks", kind="count"),
            Column(title="way"),
            Column(title="step", kind="number", unit="ms", hint="median with its 95 % interval"),
            Column(title="optimizer", kind="number", unit="ms"),
            *(Column(title=kind, kind="bytes", hint="on the rank with most") for kind in KINDS),
            Column(title="least state", kind="bytes", hint="on the rank with least"),
            Column(title="moved", kind="bytes", hint="per rank and step, predicted"),
            Column(title="counted", kind="bytes", hint="of the collectives that were called"),
        ),
        rows=tuple(rows),
        caption="Times of the slowest rank; all ways take turns. Moved: an all-reduce is 2(n-1)/n"
        " of the gradients, a reduce-scatter, an all-gather or a broadcast (n-1)/n.",
    )


def _stages(done: Sequence[Divided]) -> Iterator[Table]:
    rows: list[tuple[Cell, ...]] = []
    for case in done:
        parts = [case.held(WHOLE, kind) for kind in KINDS]
        if case.ranks == 1 or not all(parts):
            continue
        held = [part[0] for part in parts]
        for stage, divided in enumerate(((), (2,), (1, 2), (0, 1, 2))):
            sizes = [s / case.ranks if place in divided else s for place, s in enumerate(held)]
            # Gradients are reduced and parameters gathered; stage 3 gathers them twice.
            moves = (3 if stage == 3 else 2) * held[0] * (case.ranks - 1) / case.ranks
            name = f"ZeRO {stage}" if stage else "none"
            rows.append((case.title, name, *sizes, sum(sizes), moves))
    if rows:
        yield Table(
            name="sharding-stages",
            title="What each stage of ZeRO leaves on a rank",
            columns=(
                Column(title="case"),
                Column(title="stage"),
                *(Column(title=kind, kind="bytes") for kind in KINDS),
                Column(title="sum", kind="bytes"),
                Column(title="moved", kind="bytes", hint="per rank and step, predicted"),
            ),
            rows=tuple(rows),
            caption="From the unsharded bytes; activations come on top.",
        )
