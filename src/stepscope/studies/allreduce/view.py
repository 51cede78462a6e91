"""Findings, figure and tables of the collectives, from records alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.analysis.links import Link, bus_factor, fit_link
from stepscope.records.schema import Record
from stepscope.records.stats import Summary, summarize
from stepscope.report.blocks import Block, Cell, Column, Curve, Figure, Finding, Interval, Table
from stepscope.report.format import bytes_, duration, percent, rate
from stepscope.studies.published_view import Mine, published_tables
from stepscope.studies.ranked import backend_of, rank_words

FORMULA = (
    "busbw = algbw × 2(n-1)/n (all-reduce), (n-1)/n (all-gather, reduce-scatter), 1 (broadcast)"
)


class Point(NamedTuple):
    size: int
    time: Summary
    """Of the slowest rank in each round, in ms."""
    wrong: float

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the message per second."""
        return self.size / self.time.median * 1e3


class Sweep(NamedTuple):
    record: Record
    points: list[Point]
    link: Link | None

    @property
    def collective(self) -> str:
        return str(self.record.config["collective"])

    @property
    def ranks(self) -> int:
        return int(self.record.config["ranks"])

    @property
    def backend(self) -> str:
        return backend_of(self.record)

    @property
    def place(self) -> str:
        return f"{rank_words(self.ranks)}, {self.backend}"

    @property
    def name(self) -> str:
        return f"{self.collective}, {self.place}"

    @property
    def best(self) -> Point:
        """Where most bytes move in a second."""
        return max(self.points, key=lambda point: point.algorithm_bandwidth)

    def bus_bandwidth(self, point: Point) -> float | None:
        """None for one rank, from which nothing goes over a link."""
        if self.ranks == 1:
            return None
        return point.algorithm_bandwidth * bus_factor(self.collective, self.ranks)


def collective_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    sweeps = [sweep_of(record) for record in records if record.status == "ok"]
    mine = [
        Mine(
            sweep.record,
            {"collective": sweep.collective, "ranks": sweep.ranks, "size": point.size},
            {"time": point.time.median},
        )
        for sweep in sweeps
        for point in sweep.points
    ]
    return (
        *_findings(sweeps),
        *_figures(sweeps),
        _table(records, sweeps),
        *_link_table(sweeps),
        *published_tables("allreduce", mine),
    )


def sweep_of(record: Record) -> Sweep:
    points = []
    for size in record.config["sizes"]:
        held = [series.values for series in record.series if series.size == size]
        if not held:
            continue
        slowest = [max(samples) for samples in zip(*held, strict=True)]
        wrong = record.quantity("wrong", size=size) or 0.0
        # Every rank has as many elements: a few at the end may be left out.
        ranks = record.config["ranks"]
        carried = size // 4 // ranks * ranks * 4
        points.append(Point(carried, summarize(slowest), wrong))
    link = fit_link([p.size for p in points], [p.time.median for p in points])
    return Sweep(record, points, link)


def _findings(sweeps: Sequence[Sweep]) -> Iterator[Finding]:
    for sweep in sweeps:
        wrong = [point for point in sweep.points if point.wrong]
        if wrong:
            yield Finding(
                text=f"{sweep.name}: {wrong[0].wrong:g} elements of {bytes_(wrong[0].size)} are"
                " wrong; its times mean nothing.",
                tone="warn",
            )
    for place, held in _by_ranks(sweeps).items():
        yield _alone(held[0]) if len(held) == 1 else _compared(place, held)


def _by_ranks(sweeps: Sequence[Sweep]) -> dict[str, list[Sweep]]:
    """Those that say something, by ranks and backend."""
    found: dict[str, list[Sweep]] = {}
    for sweep in sweeps:
        if sweep.points:
            found.setdefault(sweep.place, []).append(sweep)
    return found


def _alone(sweep: Sweep) -> Finding:
    small, best = min(sweep.points), sweep.best
    carried = sweep.bus_bandwidth(best)
    if carried is None:
        return Finding(
            text=f"{sweep.name}: a call takes {duration(small.time.median)}"
            f" ({bytes_(small.size)}); nothing goes over a link."
        )
    text = (
        f"{sweep.name}: {bytes_(small.size)} take {duration(small.time.median)}; the links carry up"
        f" to {rate(carried, 'B/s')} (busbw at {bytes_(best.size)})."
    )
    if sweep.link is not None:
        even = sweep.link.latency_ms * sweep.link.bytes_per_ms
        text += (
            f" As a line: {duration(sweep.link.latency_ms)} a message and"
            f" {rate(sweep.link.bytes_per_ms * 1e3, 'B/s')}, off by at most"
            f" {percent(sweep.link.residual)}; below {bytes_(even)} a message costs more than its"
            " bytes."
        )
    return Finding(text=text)


def _compared(place: str, sweeps: Sequence[Sweep]) -> Finding:
    """Several collectives among the same ranks; their lines are in a table."""
    quick, *_, slow = sorted(sweeps, key=lambda sweep: min(sweep.points).time.median)
    text = (
        f"{place}: {bytes_(min(quick.points).size)} take"
        f" {duration(min(quick.points).time.median)} ({quick.collective}) to"
        f" {duration(min(slow.points).time.median)} ({slow.collective})"
    )
    carried = {s.collective: held for s in sweeps if (held := s.bus_bandwidth(s.best)) is not None}
    if not carried:
        return Finding(text=f"{text}; nothing goes over a link.")
    least, most = min(carried, key=lambda c: carried[c]), max(carried, key=lambda c: carried[c])
    return Finding(
        text=f"{text}; the links carry up to {rate(carried[least], 'B/s')} ({least}) and"
        f" {rate(carried[most], 'B/s')} ({most}) as busbw."
    )


def _figures(sweeps: Sequence[Sweep]) -> Iterator[Figure]:
    for place, held in _by_ranks(sweeps).items():
        if held[0].ranks > 1:
            yield Figure(
                name=f"allreduce-bandwidth-{held[0].ranks}-{held[0].backend}",
                title=f"What the links carry: {place}",
                kind="lines",
                curves=tuple(
                    Curve(
                        label=sweep.collective,
                        x=tuple(float(point.size) for point in sweep.points),
                        y=tuple((sweep.bus_bandwidth(p) or 0.0) / 1e9 for p in sweep.points),
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


def _table(records: Sequence[Record], sweeps: Sequence[Sweep]) -> Table:
    done = {sweep.record.id: sweep for sweep in sweeps}
    rows: list[tuple[Cell, ...]] = []
    for record in records:
        config = record.config
        head: tuple[Cell, ...] = (config["collective"], config["ranks"])
        if record.id not in done:
            rows.append((*head, config["backend"], *(None,) * 3, record.status, *(None,) * 3))
            continue
        sweep = done[record.id]
        for point in sweep.points:
            time = Interval(value=point.time.median, low=point.time.low, high=point.time.high)
            rows.append(
                (
                    *head, sweep.backend, point.size, point.size // 4, "float32", time,
                    point.algorithm_bandwidth, sweep.bus_bandwidth(point), int(point.wrong),
                )
            )  # fmt: skip
    return Table(
        name="allreduce-times",
        title="Collectives by size",
        columns=(
            Column(title="collective"),
            Column(title="ranks", kind="count"),
            Column(title="backend"),
            Column(title="size", kind="bytes"),
            Column(title="count", kind="count"),
            Column(title="type"),
            Column(
                title="time", kind="number", unit="ms",
                hint="of the slowest rank, after a barrier; median with its 95 % interval",
            ),
            Column(title="algbw", kind="rate", unit="B/s"),
            Column(title="busbw", kind="rate", unit="B/s"),
            Column(title="wrong", kind="count", hint="elements with a wrong result"),
        ),
        rows=tuple(rows),
        caption=f"algbw = size / time; {FORMULA}. Starting the processes is not timed.",
    )  # fmt: skip


def _link_table(sweeps: Sequence[Sweep]) -> Iterator[Table]:
    rows = tuple(
        (sweep.name, sweep.link.latency_ms, sweep.link.bytes_per_ms * 1e3, sweep.link.residual)
        for sweep in sweeps
        if sweep.link is not None and sweep.ranks > 1
    )
    if rows:
        yield Table(
            name="allreduce-links",
            title="Latency and bandwidth",
            columns=(
                Column(title="collective"),
                Column(title="α", kind="number", unit="ms", hint="what a message costs"),
                Column(title="1/β", kind="rate", unit="B/s", hint="bytes per second"),
                Column(title="residual", kind="percent", hint="the worst point's distance"),
            ),
            rows=rows,
            caption="t = α + β·bytes, fitted to the medians by least relative squares.",
        )
