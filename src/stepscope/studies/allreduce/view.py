"""Findings, figure and tables of the collectives. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.analysis.links import Link, bus_factor, fit_link
from stepscope.records.schema import Record
from stepscope.records.stats import Summary
from stepscope.report.blocks import Block, Curve, Figure, Finding, Table, Value
from stepscope.report.format import bytes_, duration, percent, rate
from stepscope.report.tables import col, interval, table
from stepscope.studies.allreduce.cases import AllReduceCase
from stepscope.studies.base import Result
from stepscope.studies.published_view import Mine, published_tables
from stepscope.studies.ranked import backend_of, rank_words, slowest_summary

FORMULA = (
    "busbw = algbw × 2(n-1)/n (all-reduce), (n-1)/n (all-gather, reduce-scatter), 1 (broadcast)"
)


class Point(NamedTuple):
    """One size of a sweep."""

    record: Record
    case: AllReduceCase
    size: int
    time: Summary
    """Of the slowest rank in each round, in ms."""
    wrong: int

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the message per second."""
        return self.size / self.time.median * 1e3

    @property
    def bus_bandwidth(self) -> float | None:
        """None for one rank, from which nothing goes over a link."""
        if self.case.ranks == 1:
            return None
        return self.algorithm_bandwidth * bus_factor(self.case.collective, self.case.ranks)


class Sweep(NamedTuple):
    """A case with a point for each size; a failed one has none."""

    record: Record
    case: AllReduceCase
    points: list[Point]

    @property
    def link(self) -> Link | None:
        return fit_link([p.size for p in self.points], [p.time.median for p in self.points])

    @property
    def place(self) -> str:
        return f"{rank_words(self.case.ranks)}, {backend_of(self.record, self.case)}"

    @property
    def name(self) -> str:
        return f"{self.case.collective}, {self.place}"

    @property
    def smallest(self) -> Point:
        return min(self.points, key=lambda point: point.size)

    @property
    def best(self) -> Point:
        """Where most bytes move in a second."""
        return max(self.points, key=lambda point: point.algorithm_bandwidth)


def collective_blocks(results: Sequence[Result[AllReduceCase]]) -> tuple[Block, ...]:
    sweeps = [Sweep(*result, list(_points(*result))) for result in results]
    mine = [
        Mine(
            point.record,
            {"collective": point.case.collective, "ranks": point.case.ranks, "size": point.size},
            {"time": point.time.median},
        )
        for sweep in sweeps
        for point in sweep.points
    ]
    return (
        *_findings(sweeps),
        *_figures(sweeps),
        _table(sweeps),
        *_link_table(sweeps),
        *published_tables("allreduce", mine),
    )


def _points(record: Record, case: AllReduceCase) -> Iterator[Point]:
    for size in case.sizes if record.status == "ok" else ():
        time = slowest_summary(record, "collective", size=size)
        if time is not None:
            # Every rank has as many elements: a few at the end may be left out.
            carried = size // 4 // case.ranks * case.ranks * 4
            wrong = record.quantity("wrong", size=size) or 0.0
            yield Point(record, case, carried, time, int(wrong))


def _findings(sweeps: Sequence[Sweep]) -> Iterator[Finding]:
    for sweep in sweeps:
        wrong = next((point for point in sweep.points if point.wrong), None)
        if wrong is not None:
            yield Finding(
                code="allreduce.wrong-elements",
                values={
                    "collective": sweep.case.collective, "ranks": sweep.case.ranks,
                    "elements": wrong.wrong, "bytes": wrong.size,
                },
                records=(sweep.record.id,),
                text=f"{sweep.name}: {wrong.wrong:g} elements of {bytes_(wrong.size)} are"
                " wrong; its times mean nothing.",
                tone="warn",
            )  # fmt: skip
    for place, held in _by_ranks(sweeps).items():
        yield _single(held[0]) if len(held) == 1 else _compared(place, held)


def _by_ranks(sweeps: Sequence[Sweep]) -> dict[str, list[Sweep]]:
    """Those that have points, by ranks and backend."""
    found: dict[str, list[Sweep]] = {}
    for sweep in sweeps:
        if sweep.points:
            found.setdefault(sweep.place, []).append(sweep)
    return found


def _single(sweep: Sweep) -> Finding:
    small, best, link = sweep.smallest, sweep.best, sweep.link
    values: dict[str, Value] = {
        "collective": sweep.case.collective, "ranks": sweep.case.ranks, "bytes": small.size,
        "ms": small.time.median,
    }  # fmt: skip
    if best.bus_bandwidth is None:
        return Finding(
            code="allreduce.one-rank",
            values=values,
            records=(sweep.record.id,),
            text=f"{sweep.name}: a call takes {duration(small.time.median)}"
            f" ({bytes_(small.size)}); nothing goes over a link.",
        )
    conclusion = ""
    if link is not None:
        values |= {"latency_ms": link.latency_ms, "bytes_per_s": link.bytes_per_ms * 1e3}
        conclusion = (
            f"As a line: {duration(link.latency_ms)} a message and"
            f" {rate(link.bytes_per_ms * 1e3, 'B/s')}, off by at most {percent(link.residual)};"
            f" below {bytes_(link.latency_ms * link.bytes_per_ms)} a message costs more than its"
            " bytes."
        )
    return Finding(
        code="allreduce.link",
        values=values | {"busbw": best.bus_bandwidth},
        records=(sweep.record.id,),
        text=f"{sweep.name}: {bytes_(small.size)} take {duration(small.time.median)}; the links"
        f" carry up to {rate(best.bus_bandwidth, 'B/s')} (busbw at {bytes_(best.size)}).",
        conclusion=conclusion,
    )


def _compared(place: str, sweeps: Sequence[Sweep]) -> Finding:
    """Several collectives among the same ranks; their lines are in a table."""
    quick, *_, slow = sorted(sweeps, key=lambda sweep: sweep.smallest.time.median)
    carried = {s.case.collective: s.best.bus_bandwidth or 0.0 for s in sweeps}
    least, most = min(carried, key=lambda c: carried[c]), max(carried, key=lambda c: carried[c])
    text = (
        f"{place}: {bytes_(quick.smallest.size)} take"
        f" {duration(quick.smallest.time.median)} ({quick.case.collective}) to"
        f" {duration(slow.smallest.time.median)} ({slow.case.collective})"
    )
    alone = sweeps[0].case.ranks == 1
    text += "; nothing goes over a link." if alone else (
        f"; the links carry up to {rate(carried[least], 'B/s')} ({least}) and"
        f" {rate(carried[most], 'B/s')} ({most}) as busbw."
    )  # fmt: skip
    return Finding(
        code="allreduce.compared",
        values={
            "ranks": sweeps[0].case.ranks,
            "quickest": quick.case.collective,
            "quickest_ms": quick.smallest.time.median,
            "slowest": slow.case.collective,
            "slowest_ms": slow.smallest.time.median,
            **({} if alone else {f"busbw of {name}": value for name, value in carried.items()}),
        },
        records=tuple(sweep.record.id for sweep in sweeps),
        text=text,
    )


def _figures(sweeps: Sequence[Sweep]) -> Iterator[Figure]:
    for place, held in _by_ranks(sweeps).items():
        first = held[0]
        if first.case.ranks > 1:
            yield Figure(
                name=f"allreduce-bandwidth-{first.case.ranks}"
                f"-{backend_of(first.record, first.case)}",
                title=f"What the links carry: {place}",
                kind="lines",
                curves=tuple(
                    Curve(
                        label=sweep.case.collective,
                        x=tuple(float(point.size) for point in sweep.points),
                        y=tuple((point.bus_bandwidth or 0.0) / 1e9 for point in sweep.points),
                    )
                    for sweep in held
                ),
                x_label="message",
                y_label="busbw, GB/s",
                x_log=True,
                x_bytes=True,
                y_log=True,
                caption=FORMULA,
            )


def _table(sweeps: Sequence[Sweep]) -> Table:
    rows: list[Sweep | Point] = []
    for sweep in sweeps:
        rows += sweep.points if sweep.record.status == "ok" else [sweep]
    return table(
        "allreduce-times",
        "Collectives by size",
        rows,
        [
            col("collective", lambda r: r.case.collective, key=True),
            col("ranks", lambda r: r.case.ranks, "count", key=True),
            col("backend", lambda r: backend_of(r.record, r.case), key=True),
            col("size", lambda r: r.size, "bytes"),
            col("count", lambda r: r.size // 4, "count"),
            col("type", lambda _: "float32"),
            col(
                "time",
                lambda r: interval(r.time),
                unit="ms",
                hint="of the slowest rank, after a barrier; median with its 95 % interval",
            ),
            col("algbw", lambda r: r.algorithm_bandwidth, "rate", unit="B/s"),
            col("busbw", lambda r: r.bus_bandwidth, "rate", unit="B/s"),
            col("wrong", lambda r: r.wrong, "count", hint="elements with a wrong result"),
        ],
        caption=f"algbw = size / time; {FORMULA}. Starting the processes is not timed.",
    )


def _link_table(sweeps: Sequence[Sweep]) -> Iterator[Table]:
    rows = [
        (sweep, sweep.link) for sweep in sweeps if sweep.link is not None and sweep.case.ranks > 1
    ]
    if rows:
        yield table(
            "allreduce-links",
            "Latency and bandwidth",
            rows,
            [
                col("collective", lambda r: r[0].name),
                col("α", lambda r: r[1].latency_ms, unit="ms", hint="what a message costs"),
                col(
                    "1/β",
                    lambda r: r[1].bytes_per_ms * 1e3,
                    "rate",
                    unit="B/s",
                    hint="bytes per second",
                ),
                col(
                    "residual",
                    lambda r: r[1].residual,
                    "percent",
                    hint="the worst point's distance",
                ),
            ],
            caption="t = α + β·bytes, fitted to the medians by least relative squares.",
        )
