"""A prediction held against real ranks: their links fitted, each way predicted and run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.analysis.links import fit_link
from stepscope.analysis.rehearsal.channel import MeasuredChannel, fit_channel
from stepscope.analysis.rehearsal.recording import Recording, recording_of
from stepscope.analysis.rehearsal.replay import Upkeep, name_of, replay
from stepscope.records.schema import Record
from stepscope.records.stats import Summary, summarize
from stepscope.report.blocks import Cell, Column, Finding, Interval, Table
from stepscope.report.format import duration, percent, rate
from stepscope.studies.rehearsal.ranks import ALONE, strategies

GOAL = 0.15
"""How far a predicted step may be from the measured one."""


class Row(NamedTuple):
    way: str
    predicted_ms: float
    measured: Summary
    exposed_predicted_ms: float
    exposed_measured_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured.median - 1


class Check(NamedTuple):
    record: Record
    recording: Recording
    channel: MeasuredChannel
    upkeep: Upkeep
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        config = self.record.config
        how = "waiting" if self.record.notes.get("compute") == "waits" else "computing"
        return (
            f"{config['size']} at context {config['context']} on {config['ranks']} {how} ranks"
            f" over {self.record.notes.get('backend', 'gloo')}"
        )

    @property
    def worst(self) -> Row:
        return max(self.rows, key=lambda row: abs(row.error))


def check_of(record: Record) -> Check | None:
    recording = recording_of(record)
    if recording is None:
        return None
    slowest = _slowest(record)
    medians = {name: held.median for name, held in slowest.items()}
    alone = {int(name.split(".")[1]): ms for name, ms in medians.items() if name[:6] == "alone."}
    packs = {int(name.split(".")[1]): ms for name, ms in medians.items() if name[:5] == "pack."}
    bursts = {}
    for name, ms in medians.items():
        if name.startswith("burst."):
            _, size, count = name.split(".")
            bursts[int(size), int(count)] = ms
    channel = fit_channel(alone, bursts)
    pack = fit_link(list(packs), list(packs.values()))
    still = slowest.get(f"step.{ALONE}")
    if channel is None or still is None:
        return None
    upkeep = Upkeep(
        pack=pack.latency_ms if pack else 0.0,
        pack_byte=1 / pack.bytes_per_ms if pack else 0.0,
        issue=medians.get("issue", 0.0),
        agree=medians.get("agree", 0.0),
    )
    rows = []
    for strategy, bucket_mb in strategies(record.config["bucket_mb"]):
        way = name_of(strategy, bucket_mb)
        measured = slowest.get(f"step.{way}")
        if measured is None:
            continue
        told = replay(recording, strategy, channel, bucket_mb, upkeep)
        exposed = measured.median - still.median
        rows.append(Row(way, told.step_ms, measured, told.exposed_ms, exposed))
    return Check(record, recording, channel, upkeep, tuple(rows)) if rows else None


def _slowest(record: Record) -> dict[str, Summary]:
    """Of every series that the ranks measured: the slowest rank of each round."""
    held: dict[str, list[tuple[float, ...]]] = {}
    for series in record.series:
        if "." in series.name or series.name in ("issue", "agree"):
            held.setdefault(series.name, []).append(series.values)
    return {
        name: summarize([max(values) for values in zip(*ranks, strict=True)])
        for name, ranks in held.items()
    }


def check_findings(checks: Sequence[Check]) -> Iterator[Finding]:
    for check in checks:
        worst, channel = check.worst, check.channel
        within = abs(worst.error) <= GOAL
        verdict = f"within {percent(GOAL)}" if within else f"above the goal of {percent(GOAL)}"
        yield Finding(
            text=f"{check.title}: predicted steps are off by {percent(abs(worst.error))} at most"
            f" ({worst.way}: {duration(worst.predicted_ms)} predicted,"
            f" {duration(worst.measured.median)} measured), {verdict}. The link as measured:"
            f" {duration(channel.alone_link.latency_ms)} a reduction and"
            f" {rate(channel.alone_link.bytes_per_ms * 1e3, 'B/s')}; in a queue"
            f" {duration(channel.queued_link.latency_ms)} and"
            f" {rate(channel.queued_link.bytes_per_ms * 1e3, 'B/s')}.",
            tone="good" if within else "warn",
        )


def check_table(checks: Sequence[Check]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            check.title,
            row.way,
            row.predicted_ms,
            Interval(value=row.measured.median, low=row.measured.low, high=row.measured.high),
            row.error,
            row.exposed_predicted_ms,
            row.exposed_measured_ms,
        )
        for check in checks
        for row in check.rows
    ]
    return Table(
        name="rehearsal-checks",
        title="Predicted against real ranks",
        columns=(
            Column(title="case"),
            Column(title="way"),
            Column(title="predicted", kind="number", unit="ms"),
            Column(
                title="measured", kind="number", unit="ms",
                hint="the slowest rank, median with its 95 % interval",
            ),
            Column(title="error", kind="percent"),
            Column(title="exposed, predicted", kind="number", unit="ms"),
            Column(
                title="exposed, measured", kind="number", unit="ms",
                hint="step minus the step without communication on the same ranks",
            ),
        ),
        rows=tuple(rows),
        caption="Links and steps are measured in turns in the same ranks; no step enters its"
        " prediction.",
    )  # fmt: skip
