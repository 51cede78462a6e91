"""What a rank holds, way by way, from records alone: tensors by kind, and a GPU's counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.records.schema import Record
from stepscope.records.stats import Summary, summarize
from stepscope.report.blocks import Cell, Column, Curve, Figure, Finding, Table
from stepscope.report.format import bytes_
from stepscope.studies.ranked import backend_of, rank_words
from stepscope.studies.sharding.ranks import WHOLE

KINDS = ("parameters", "gradients", "state")
STATIONS = ("after model", "after forward", "after backward", "after step", "peak")
COUNTERS = ("allocated", "reserved", "driver")


class Divided(NamedTuple):
    record: Record

    @property
    def ranks(self) -> int:
        return int(self.record.config["ranks"])

    @property
    def backend(self) -> str:
        return backend_of(self.record)

    @property
    def title(self) -> str:
        return f"{self.record.config['size']}, {rank_words(self.ranks)}, {self.backend}"

    def held(self, way: str, kind: str, phase: str = "") -> list[float]:
        """Bytes of that kind on each rank, after a phase where one is named."""
        found = (
            self.record.quantity(kind, variant=way, phase=phase, rank=rank)
            for rank in range(self.ranks)
        )
        return [value for value in found if value is not None]

    def samples(self, way: str, phase: str) -> list[float]:
        """Of the slowest rank in each round."""
        held = [s.values for s in self.record.series if (s.variant, s.name) == (way, phase)]
        return [max(values) for values in zip(*held, strict=True)]

    def of(self, way: str, phase: str) -> Summary | None:
        values = self.samples(way, phase)
        return summarize(values) if values else None


def alone_finding(case: Divided) -> Iterator[Finding]:
    if case.ranks == 1:
        yield Finding(
            text=f"{case.title}: one rank has nobody to share with; only the cost of the wrappers"
            " shows."
        )


def refused_findings(case: Divided, ways: Sequence[str]) -> Iterator[Finding]:
    refused = case.record.attachment("refused", dict[str, str]) or {}
    for way in ways:
        reason = refused.get(way)
        if reason:
            yield Finding(text=f"{case.title}: {way} does not run here: {reason}", tone="warn")


def counter_finding(case: Divided, way: str) -> Iterator[Finding]:
    """After a step, by the three who count: they need not agree on whether sharding saves."""
    station = STATIONS[3]
    whole, ours = (
        {counter: max(case.held(one, counter, station), default=None) for counter in COUNTERS}
        for one in (WHOLE, way)
    )
    if None in (*whole.values(), *ours.values()):
        return
    told = {
        counter: f"{bytes_(whole[counter] or 0)} and {bytes_(ours[counter] or 0)}"
        for counter in COUNTERS
    }
    text = (
        f"{case.title}: after a step, unsharded and {way}, a rank has allocated"
        f" {told['allocated']}; its allocator has reserved {told['reserved']}; the driver shows"
        f" {told['driver']} for all processes on the GPU."
    )
    if (ours["driver"] or 0) > (whole["driver"] or 0) and (ours["allocated"] or 0) < (
        whole["allocated"] or 0
    ):
        text += (
            " The driver's figure goes up where less is allocated: it has what the allocator"
            " keeps for later and what libraries take, not what is in use."
        )
    yield Finding(text=text)


def memory_figure(case: Divided, known: tuple[str, ...]) -> Iterator[Figure]:
    ways = tuple(way for way in known if case.held(way, "state"))
    if ways and case.ranks > 1:
        yield Figure(
            name=f"{case.record.study}-memory-{case.record.case}",
            title=f"What a rank holds: {case.title}",
            kind="stacks",
            curves=tuple(
                Curve(
                    label=kind,
                    x=ways,
                    y=tuple(max(case.held(way, kind), default=0.0) / 2**20 for way in ways),
                )
                for kind in KINDS
            ),
            x_label="way",
            y_label="MiB",
            caption="Tensors after one step, on the rank that holds most; activations are gone.",
        )


def station_table(done: Sequence[Divided], ways: Sequence[str]) -> Iterator[Table]:
    """A GPU's counters through a step; the driver's includes all processes on it."""
    rows: list[tuple[Cell, ...]] = []
    for case in done:
        for way in ways:
            for station in STATIONS:
                found = [case.held(way, counter, station) for counter in COUNTERS]
                if any(found):
                    cells = (max(values, default=None) for values in found)
                    rows.append((case.title, way, station, *cells))
    if rows:
        yield Table(
            name=f"{done[0].record.study}-stations",
            title="A GPU's memory through a step",
            columns=(
                Column(title="case"),
                Column(title="way"),
                Column(title="station"),
                *(Column(title=counter, kind="bytes") for counter in COUNTERS),
            ),
            rows=tuple(rows),
            caption="On the rank with most, through its first step; the peak is that of the second."
            " `reserved` is what the allocator holds, freed or not. The driver's figure has every"
            " process on the GPU, their contexts and libraries. Each way starts with an empty"
            " allocator and with libraries loaded.",
        )
