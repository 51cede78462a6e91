"""Compare predictions with real ranks: fit their links, predict each strategy, compare steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rehearsal_check.cases import CheckCase, Sampled, strategies
from rehearsal_check.channel import MeasuredChannel, measured_channel
from rehearsal_check.contention import ContendedQueue
from stepscope.analysis.links import fit_link
from stepscope.analysis.rehearsal.recording import Recording, recording_of
from stepscope.analysis.rehearsal.replay import Upkeep, name_of, replay
from stepscope.records.schema import Record, Series
from stepscope.records.stats import Summary, summarize
from stepscope.report.blocks import Block, Finding, Table
from stepscope.report.format import duration, percent, rate
from stepscope.report.tables import col, failed_table, interval, table
from stepscope.studies.base import Result
from stepscope.studies.ddp.cases import ALONE


class Row(NamedTuple):
    """Predicted and measured step of one strategy."""

    strategy: str
    predicted_ms: float
    measured: Summary
    exposed_predicted_ms: float
    exposed_measured_ms: float | None
    """None if it is below zero."""

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured.median - 1


class Comparison(NamedTuple):
    """The measured link, and the predicted and measured step of every strategy."""

    channel: MeasuredChannel
    upkeep: Upkeep
    contention: tuple[float, float]
    """Slowdown of work by messages, and delay of messages per ms of work."""
    rows: tuple[Row, ...]

    @property
    def worst(self) -> Row:
        return max(self.rows, key=lambda row: abs(row.error))


class Check(NamedTuple):
    """A comparison of predictions with real ranks, and its record."""

    record: Record
    case: CheckCase
    comparison: Comparison

    @property
    def title(self) -> str:
        activity = "waiting" if self.record.notes.get("compute") == "waits" else "computing"
        return (
            f"{self.case.size} at context {self.case.context} on {self.case.ranks} {activity} ranks"
            f" over {self.record.notes.get('backend', 'gloo')}"
        )


def view(results: Sequence[Result[CheckCase]]) -> tuple[Block, ...]:
    checks = [check for result in results if (check := check_of(*result))]
    tables = [check_table(checks)] if checks else []
    return (*check_findings(checks), *tables, *failed_table("rehearsal-check", results))


def check_of(record: Record, case: CheckCase) -> Check | None:
    recording = recording_of(record)
    if recording is None:
        return None
    comparison = compare(recording, record.series, case.bucket_mb)
    return None if comparison is None else Check(record, case, comparison)


def compare(
    recording: Recording, series: Iterable[Series], bucket_mb: Sequence[float]
) -> Comparison | None:
    """Compare predictions with samples of real ranks; None if the link was not measured."""
    slowest = _slowest(series)
    medians = {what: summary.median for what, summary in slowest.items()}
    alone = {size: ms for (size, _), ms in _sized(medians, "alone").items()}
    packs = {size: ms for (size, _), ms in _sized(medians, "pack").items()}
    bursts = _sized(medians, "burst")
    channel = measured_channel(alone, bursts)
    pack = fit_link(list(packs), list(packs.values()))
    baseline = slowest.get(Sampled("step", ALONE))
    if channel is None or baseline is None:
        return None
    issue = medians.get(Sampled("issue"), 0.0)
    slowed, drag = _contention(medians, alone, packs, issue)
    upkeep = Upkeep(
        pack=pack.latency_ms if pack else 0.0,
        pack_byte=1 / pack.bytes_per_ms if pack else 0.0,
        issue=issue,
        agree=medians.get(Sampled("agree"), 0.0),
    )
    rows = []
    for strategy, size in strategies(bucket_mb):
        name = name_of(strategy, size)
        measured = slowest.get(Sampled("step", name))
        if measured is not None:
            predicted = replay(
                recording, strategy, channel, size, upkeep, ContendedQueue(slowed, drag)
            )
            # Communication does not make a step faster: less is noise.
            longer = measured.median - baseline.median
            exposed = longer if longer >= 0 else None
            rows.append(Row(name, predicted.step_ms, measured, predicted.exposed_ms, exposed))
    return Comparison(channel, upkeep, (slowed, drag), tuple(rows)) if rows else None


def _contention(
    medians: Mapping[Sampled, float],
    alone: Mapping[int, float],
    packs: Mapping[int, float],
    issue: float,
) -> tuple[float, float]:
    """Mutual slowdown of packing and a concurrent reduction, over all sizes.

    Returns the slowdown factor of packing and the delay of the reduction per ms of packing.
    """
    packed, both = _sized(medians, "packed"), _sized(medians, "beside")
    known = [(size, count) for size, count in packed if size in alone and size in packs]
    work = sum(count * packs[size] for size, count in known)
    if not work:
        return 1.0, 0.0
    took = sum(packed[key] - issue for key in known)
    later = sum(both[key] - max(alone[key[0]], packed[key]) for key in known)
    return max(1.0, took / work), max(0.0, later / work)


def _slowest(series: Iterable[Series]) -> dict[Sampled, Summary]:
    """Summaries of everything measured on ranks, by the slowest rank of each round."""
    by_rank: dict[Sampled, list[tuple[float, ...]]] = {}
    for samples in series:
        if samples.variant or samples.size or samples.name in ("issue", "agree"):
            by_rank.setdefault(Sampled(samples.name, samples.variant, samples.size), []).append(
                samples.values
            )
    return {
        what: summarize([max(values) for values in zip(*ranks, strict=True)])
        for what, ranks in by_rank.items()
    }


def _sized(medians: Mapping[Sampled, float], kind: str) -> dict[tuple[int, int], float]:
    """Medians of a kind by size and number of messages."""
    return {
        (what.size, int(what.variant or 1)): ms for what, ms in medians.items() if what.name == kind
    }


def check_findings(checks: Sequence[Check]) -> Iterator[Finding]:
    for check in checks:
        worst, line = check.comparison.worst, check.comparison.channel.line
        yield Finding(
            code="rehearsal.prediction-error",
            values={
                "strategy": worst.strategy,
                "error": worst.error,
                "predicted_ms": worst.predicted_ms,
                "measured_ms": worst.measured.median,
            },
            text=f"{check.title}: the error of predicted steps is at most"
            f" {percent(abs(worst.error))} ({worst.strategy}: {duration(worst.predicted_ms)}"
            f" predicted, {duration(worst.measured.median)} measured). The measured link has a"
            f" latency of {duration(line.latency_ms)} per reduction and"
            f" {rate(line.bytes_per_ms * 1e3, 'B/s')} (residual of at most"
            f" {percent(line.residual)}).",
            records=(check.record.id,),
        )


def check_table(checks: Sequence[Check]) -> Table:
    return table(
        "rehearsal-checks",
        "Predicted and measured steps on real ranks",
        [(check.title, row) for check in checks for row in check.comparison.rows],
        [
            col("case", lambda r: r[0]),
            col("strategy", lambda r: r[1].strategy),
            col("predicted", lambda r: r[1].predicted_ms, unit="ms"),
            col(
                "measured",
                lambda r: interval(r[1].measured),
                unit="ms",
                hint="the slowest rank, median with its 95 % interval",
            ),
            col("error", lambda r: r[1].error, "percent"),
            col("exposed, predicted", lambda r: r[1].exposed_predicted_ms, unit="ms"),
            col(
                "exposed, measured",
                lambda r: r[1].exposed_measured_ms,
                unit="ms",
                hint="step minus the step without communication on the same ranks",
            ),
        ],
        caption="Links and steps are measured interleaved on the same ranks; predictions do not use"
        " the measured steps.",
    )
