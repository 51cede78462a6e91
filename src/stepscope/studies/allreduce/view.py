"""Findings, figures and tables of the collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.analysis.conclusions import NOTHING, conclude
from stepscope.analysis.effects import quotient
from stepscope.analysis.links import Link, bus_factor, fit_link
from stepscope.records.stats import Summary
from stepscope.report.blocks import Block, Figure, Finding, Table, Value
from stepscope.report.format import bytes_, duration, number, percent, rate
from stepscope.report.tables import col, interval, table
from stepscope.studies.allreduce.cases import AllReduceCase
from stepscope.studies.base import Result
from stepscope.views.builders import grouped, ids
from stepscope.views.figures import curves
from stepscope.views.ranks import RankedResult, variant_rows

FORMULA = (
    "busbw = algbw × 2(n-1)/n (all-reduce), (n-1)/n (all-gather, reduce-scatter), 1 (broadcast)"
)


class Sweep(RankedResult[AllReduceCase]):
    """One collective at several sizes."""

    @property
    def title(self) -> str:
        return f"{self.case.collective}, {self.label}"

    @property
    def points(self) -> list[Point]:
        """Points in order of size; empty for a failed case."""
        ranks, points = self.case.ranks, []
        for size in sorted(self.case.sizes) if self.record.status == "ok" else ():
            time = self.summary("collective", size=size)
            if time is not None:
                # Every rank has the same number of elements: the remainder is left out.
                carried = size // 4 // ranks * ranks * 4
                wrong = int(self.record.quantity("wrong", size=size) or 0)
                points.append(Point(self, carried, time, wrong))
        return points

    @property
    def link(self) -> Link | None:
        points = self.points
        return fit_link([p.size for p in points], [p.time.median for p in points])

    @property
    def best(self) -> Point:
        """The point with the highest bandwidth."""
        return max(self.points, key=lambda point: point.algorithm_bandwidth)


class Point(NamedTuple):
    """One size of a sweep."""

    of: Sweep
    size: int
    time: Summary
    """Times of the slowest rank in each round, in ms."""
    wrong: int

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the message per second."""
        return self.size / self.time.median * 1e3

    @property
    def bus_bandwidth(self) -> float | None:
        """Bus bandwidth; None for one rank, which uses no link."""
        case = self.of.case
        factor = bus_factor(case.collective, case.ranks)
        return self.algorithm_bandwidth * factor if case.ranks > 1 else None


def view(results: Sequence[Result[AllReduceCase]]) -> tuple[Block, ...]:
    sweeps = [Sweep(*result) for result in results]
    return (
        *_findings(sweeps),
        *_figures(sweeps),
        _table(sweeps),
        *_link_table(sweeps),
    )


def _findings(sweeps: Sequence[Sweep]) -> Iterator[Finding]:
    for sweep in sweeps:
        for point in [point for point in sweep.points if point.wrong][:1]:
            yield sweep.finding(
                "wrong-elements",
                f"{point.wrong:g} elements of {bytes_(point.size)} are wrong; its times are"
                " meaningless.",
                {
                    "collective": sweep.case.collective,
                    "elements": point.wrong,
                    "bytes": point.size,
                },
                tone="warn",
            )
    yield from _by_size(sweeps)
    yield from _more_ranks(sweeps)
    for label, group in _by_ranks(sweeps).items():
        yield _single(group[0]) if len(group) == 1 else _compared(label, group)


def _by_size(sweeps: Sequence[Sweep]) -> Iterator[Finding]:
    """The time of each message size, and which part of it the size explains."""
    for sweep in sweeps:
        points = sweep.points
        if len(points) < 2 or sweep.case.ranks == 1:
            continue
        first, last = points[0], points[-1]
        listed = ", ".join(f"{duration(p.time.median)} for {bytes_(p.size)}" for p in points)
        grows, larger = last.time.median / first.time.median, last.size / first.size
        yield sweep.finding(
            "by-size",
            f"{listed}: {number(larger, 3)} times the bytes take {number(grows, 3)} times as long.",
            {
                "collective": sweep.case.collective,
                "ranks": sweep.case.ranks,
                "bytes": larger,
                "time": grows,
            },
        )


def _more_ranks(sweeps: Sequence[Sweep]) -> Iterator[Finding]:
    """The largest message on more ranks, compared with the factor 2(n-1)/n of a ring."""
    alike = grouped(sweeps, lambda sweep: (sweep.case.collective, sweep.case.backend))
    for (collective, _), members in alike.items():
        known = {one.case.ranks: one.points[-1] for one in members if one.points}
        several = {ranks: known[ranks] for ranks in sorted(known) if ranks > 1}
        if len(several) < 2 or len({point.size // 1000 for point in several.values()}) > 1:
            continue
        (few, least), *_, (many, most) = several.items()
        effect = quotient(most.time, least.time)
        ring = bus_factor(collective, many) / bus_factor(collective, few)
        listed = ", ".join(
            f"{duration(point.time.median)} on {ranks} ranks" for ranks, point in several.items()
        )
        yield Finding(
            code="allreduce.by-ranks",
            text=f"{collective} of {bytes_(least.size)}: {listed}.",
            values={"collective": collective, "ratio": effect.value, "ring": ring},
            records=ids([point.of.record for point in several.values()]),
            conclusion=conclude(
                f"From {few} to {many} ranks the time grows {number(effect.value, 3)} times; links"
                f" of their own would give {number(ring, 3)} times. Processes of one machine share"
                " its memory and cores."
                if effect.value > ring
                else f"From {few} to {many} ranks the time grows {number(effect.value, 3)} times,"
                f" at most the {number(ring, 3)} times that a ring gives.",
                effect.against(ring),
            ),
        )


def _by_ranks(sweeps: Sequence[Sweep]) -> dict[str, list[Sweep]]:
    """Sweeps with results, grouped by ranks and backend."""
    return grouped((sweep for sweep in sweeps if sweep.points), lambda sweep: sweep.label)


def _single(sweep: Sweep) -> Finding:
    small, best, link = sweep.points[0], sweep.best, sweep.link
    took = duration(small.time.median)
    values: dict[str, Value] = {
        "collective": sweep.case.collective,
        "bytes": small.size,
        "ms": small.time.median,
    }
    if best.bus_bandwidth is None:
        text = f"a call takes {took} ({bytes_(small.size)}); one rank uses no link."
        return sweep.finding("one-rank", text, values)
    conclusion = NOTHING
    if link is not None:
        values |= {"latency_ms": link.latency_ms, "bytes_per_s": link.bytes_per_ms * 1e3}
        conclusion = conclude(
            f"Linear fit: a latency of {duration(link.latency_ms)} per message and"
            f" {rate(link.bytes_per_ms * 1e3, 'B/s')}, with a residual of at most"
            f" {percent(link.residual)}; below {bytes_(link.latency_ms * link.bytes_per_ms)} the"
            " latency dominates.",
            quotient(sweep.points[-1].time, small.time),
        )
    return sweep.finding(
        "link",
        f"{bytes_(small.size)} take {took}; the links reach"
        f" {rate(best.bus_bandwidth, 'B/s')} (busbw at {bytes_(best.size)}).",
        values | {"busbw": best.bus_bandwidth},
        conclusion=conclusion,
    )


def _compared(label: str, sweeps: Sequence[Sweep]) -> Finding:
    """Compare several collectives on the same ranks; their linear fits are in a table."""
    quick, *_, slow = sorted(sweeps, key=lambda sweep: sweep.points[0].time.median)
    first, last = quick.points[0], slow.points[0]
    reached = {s.case.collective: width for s in sweeps if (width := s.best.bus_bandwidth)}
    links = "one rank uses no link"
    if reached:
        least, most = min(reached, key=lambda c: reached[c]), max(reached, key=lambda c: reached[c])
        links = (
            f"the links reach a busbw of {rate(reached[least], 'B/s')} ({least}) to"
            f" {rate(reached[most], 'B/s')} ({most})"
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
            **{f"busbw of {name}": width for name, width in reached.items()},
        },
        records=ids(sweeps),
        text=f"{label}: {bytes_(first.size)} take {duration(first.time.median)}"
        f" ({quick.case.collective}) to {duration(last.time.median)} ({slow.case.collective});"
        f" {links}.",
    )


def _figures(sweeps: Sequence[Sweep]) -> Iterator[Figure]:
    for label, group in _by_ranks(sweeps).items():
        first = group[0]
        if first.case.ranks > 1:
            yield Figure(
                name=f"allreduce-bandwidth-{first.case.ranks}-{first.backend}",
                title=f"Bus bandwidth: {label}",
                curves=curves(
                    {
                        sweep.case.collective: {
                            float(p.size): (p.bus_bandwidth or 0.0) / 1e9 for p in sweep.points
                        }
                        for sweep in group
                    }
                ),
                x_label="message size",
                y_label="busbw, GB/s",
                x_log=True,
                x_bytes=True,
                y_log=True,
                caption=FORMULA,
            )


def _table(sweeps: Sequence[Sweep]) -> Table:
    return table(
        "allreduce-times",
        "Collectives by size",
        variant_rows(sweeps, lambda sweep: sweep.points),
        [
            col("collective", lambda r: r.of.case.collective, key=True),
            col("ranks", lambda r: r.of.case.ranks, "count", key=True),
            col("backend", lambda r: r.of.backend, key=True),
            col("size", lambda r: r.variant.size, "bytes"),
            col("count", lambda r: r.variant.size // 4, "count"),
            col("dtype", lambda _: "float32"),
            col(
                "time",
                lambda r: interval(r.variant.time),
                unit="ms",
                hint="of the slowest rank, after a barrier; median with its 95 % interval",
            ),
            col("algbw", lambda r: r.variant.algorithm_bandwidth, "rate", unit="B/s"),
            col("busbw", lambda r: r.variant.bus_bandwidth, "rate", unit="B/s"),
            col("wrong", lambda r: r.variant.wrong, "count", hint="elements with a wrong result"),
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
                col("α", lambda r: r[1].latency_ms, unit="ms", hint="latency of a message"),
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
                    hint="largest relative distance of a point",
                ),
            ],
            caption="t = α + β·bytes, fitted to the medians by least squares of relative errors.",
        )
