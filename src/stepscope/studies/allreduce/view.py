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
from stepscope.studies.ranks.results import RankedResult
from stepscope.studies.views.published import Mine, published_tables

FORMULA = (
    "busbw = algbw × 2(n-1)/n (all-reduce), (n-1)/n (all-gather, reduce-scatter), 1 (broadcast)"
)


class Sweep(RankedResult[AllReduceCase]):
    """One case: a collective at several sizes."""

    @property
    def title(self) -> str:
        return f"{self.case.collective}, {self.place}"

    @property
    def points(self) -> list[Point]:
        """In order of size; a failed case has none."""
        ranks, found = self.case.ranks, []
        for size in sorted(self.case.sizes) if self.record.status == "ok" else ():
            time = self.summary("collective", size=size)
            if time is not None:
                # Every rank has as many elements: a few at the end may be left out.
                carried = size // 4 // ranks * ranks * 4
                wrong = int(self.record.quantity("wrong", size=size) or 0)
                found.append(Point(self, carried, time, wrong))
        return found

    @property
    def link(self) -> Link | None:
        points = self.points
        return fit_link([p.size for p in points], [p.time.median for p in points])

    @property
    def best(self) -> Point:
        """Where most bytes move in a second."""
        return max(self.points, key=lambda point: point.algorithm_bandwidth)


class Point(NamedTuple):
    """One size of a sweep."""

    of: Sweep
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
        case = self.of.case
        factor = bus_factor(case.collective, case.ranks)
        return self.algorithm_bandwidth * factor if case.ranks > 1 else None


def collective_blocks(results: Sequence[Result[AllReduceCase]]) -> tuple[Block, ...]:
    sweeps = [Sweep(*result) for result in results]
    mine = [
        Mine(
            sweep.record,
            {"collective": sweep.case.collective, "ranks": sweep.case.ranks, "size": point.size},
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


def _findings(sweeps: Sequence[Sweep]) -> Iterator[Finding]:
    for sweep in sweeps:
        for point in [point for point in sweep.points if point.wrong][:1]:
            yield sweep.finding(
                "wrong-elements",
                f"{point.wrong:g} elements of {bytes_(point.size)} are wrong; its times mean"
                " nothing.",
                {
                    "collective": sweep.case.collective,
                    "elements": point.wrong,
                    "bytes": point.size,
                },
                tone="warn",
            )
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
    small, best, link = sweep.points[0], sweep.best, sweep.link
    took = duration(small.time.median)
    values: dict[str, Value] = {
        "collective": sweep.case.collective,
        "bytes": small.size,
        "ms": small.time.median,
    }
    if best.bus_bandwidth is None:
        text = f"a call takes {took} ({bytes_(small.size)}); nothing goes over a link."
        return sweep.finding("one-rank", text, values)
    conclusion = ""
    if link is not None:
        values |= {"latency_ms": link.latency_ms, "bytes_per_s": link.bytes_per_ms * 1e3}
        conclusion = (
            f"As a line: {duration(link.latency_ms)} a message and"
            f" {rate(link.bytes_per_ms * 1e3, 'B/s')}, off by at most {percent(link.residual)};"
            f" below {bytes_(link.latency_ms * link.bytes_per_ms)} a message costs more than its"
            " bytes."
        )
    return sweep.finding(
        "link",
        f"{bytes_(small.size)} take {took}; the links carry up to"
        f" {rate(best.bus_bandwidth, 'B/s')} (busbw at {bytes_(best.size)}).",
        values | {"busbw": best.bus_bandwidth},
        conclusion=conclusion,
    )


def _compared(place: str, sweeps: Sequence[Sweep]) -> Finding:
    """Several collectives among the same ranks; their lines are in a table."""
    quick, *_, slow = sorted(sweeps, key=lambda sweep: sweep.points[0].time.median)
    first, last = quick.points[0], slow.points[0]
    carried = {s.case.collective: width for s in sweeps if (width := s.best.bus_bandwidth)}
    links = "nothing goes over a link"
    if carried:
        least, most = min(carried, key=lambda c: carried[c]), max(carried, key=lambda c: carried[c])
        links = (
            f"the links carry up to {rate(carried[least], 'B/s')} ({least}) and"
            f" {rate(carried[most], 'B/s')} ({most}) as busbw"
        )
    return Finding(
        code="allreduce.compared",
        values={
            "ranks": quick.case.ranks,
            "backend": quick.backend,
            "quickest": quick.case.collective,
            "quickest_ms": first.time.median,
            "slowest": slow.case.collective,
            "slowest_ms": last.time.median,
            **{f"busbw of {name}": width for name, width in carried.items()},
        },
        records=tuple(sweep.record.id for sweep in sweeps),
        text=f"{place}: {bytes_(first.size)} take {duration(first.time.median)}"
        f" ({quick.case.collective}) to {duration(last.time.median)} ({slow.case.collective});"
        f" {links}.",
    )


def _figures(sweeps: Sequence[Sweep]) -> Iterator[Figure]:
    for place, held in _by_ranks(sweeps).items():
        first = held[0]
        if first.case.ranks > 1:
            yield Figure(
                name=f"allreduce-bandwidth-{first.case.ranks}-{first.backend}",
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


class Row(NamedTuple):
    record: Record
    sweep: Sweep
    point: Point | None


def _table(sweeps: Sequence[Sweep]) -> Table:
    return table(
        "allreduce-times",
        "Collectives by size",
        [
            Row(sweep.record, sweep, point)
            for sweep in sweeps
            for point in (sweep.points if sweep.record.status == "ok" else [None])
        ],
        [
            col("collective", lambda r: r.sweep.case.collective, key=True),
            col("ranks", lambda r: r.sweep.case.ranks, "count", key=True),
            col("backend", lambda r: r.sweep.backend, key=True),
            col("size", lambda r: r.point.size, "bytes"),
            col("count", lambda r: r.point.size // 4, "count"),
            col("type", lambda _: "float32"),
            col(
                "time",
                lambda r: interval(r.point.time),
                unit="ms",
                hint="of the slowest rank, after a barrier; median with its 95 % interval",
            ),
            col("algbw", lambda r: r.point.algorithm_bandwidth, "rate", unit="B/s"),
            col("busbw", lambda r: r.point.bus_bandwidth, "rate", unit="B/s"),
            col("wrong", lambda r: r.point.wrong, "count", hint="elements with a wrong result"),
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
                col("collective", lambda r: r[0].title),
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
