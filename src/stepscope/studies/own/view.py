"""Tables and figures of a user's model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.analysis.effects import quotient
from stepscope.analysis.limits import achieved_flops, median_ms, mfu, step_ms
from stepscope.report.blocks import Block, Finding, Table
from stepscope.report.format import bytes_, duration
from stepscope.report.tables import col, failed_table, interval, table
from stepscope.studies.base import Result
from stepscope.studies.own.cases import AS_IS, STUDY_NAME, OwnCase, OwnStep
from stepscope.views.builders import bracketed
from stepscope.views.program.findings import memory_finding, rate_finding
from stepscope.views.program.rows import ProgramRecord, resting_on
from stepscope.views.program.view import account_blocks, trace_parts
from stepscope.views.program.waterfall import waterfall_blocks
from stepscope.views.trace.findings import trace_findings

Own = Result[OwnCase]


def view(results: Sequence[Own]) -> tuple[Block, ...]:
    done = [result for result in results if result.record.status == "ok"]
    lead = [ProgramRecord(result.record) for result in done[:1]]
    return (
        *_changes(done),
        *(finding for result in lead for finding in resting_on(result, _findings(result))),
        *([settings_table(done)] if len(done) > 1 else []),
        *(block for result in lead for block in waterfall_blocks(result, STUDY_NAME)),
        *(block for result in lead for block in trace_parts(result, STUDY_NAME)),
        *(block for result in lead for block in account_blocks(result)),
        *failed_table(STUDY_NAME, results),
    )


def _findings(lead: ProgramRecord) -> Iterator[Finding]:
    if lead.summary is not None:
        yield from trace_findings(lead.summary, lead.step_ms, records=(lead.record.id,))
    yield from memory_finding(lead)
    yield from rate_finding(lead)


def _changes(done: Sequence[Own]) -> Iterator[Finding]:
    """Compare the first case with those that differ from it in one setting."""
    for other in done[1:]:
        first = done[0]
        differ = [
            name
            for name in OwnStep.__struct_fields__
            if getattr(other.case, name) != getattr(first.case, name)
        ]
        before, after = step_ms(first.record), step_ms(other.record)
        if len(differ) != 1 or differ == ["model"] or before is None or after is None:
            continue
        (setting,) = differ
        value, base_value = getattr(other.case, setting), getattr(first.case, setting)
        gain = quotient(before, after).times(other.case.batch / first.case.batch)
        speedup = gain.value
        peaks = [result.record.quantity("peak_bytes") for result in (first, other)]
        memory = ""
        if peaks[0] and peaks[1]:
            memory = f", and the peak memory goes from {bytes_(peaks[0])} to {bytes_(peaks[1])}"
        yield Finding(
            code="own.setting",
            values={
                "setting": setting,
                "value": value,
                "base_value": base_value,
                "step_ms": after.median,
                "base_ms": before.median,
                "speedup": speedup,
                "peak_bytes": peaks[1],
                "base_peak_bytes": peaks[0],
            },
            records=(first.record.id, other.record.id),
            text=f"With {setting} {value} instead of {base_value} a step takes"
            f" {duration(after.median)} instead of {duration(before.median)}:"
            f" {bracketed(gain)} the speed{' per sample' if setting == 'batch' else ''}"
            f"{memory}.",
            tone="good" if gain.above else "info",
        )


def settings_table(results: Sequence[Own]) -> Table:
    def samples(result: Own) -> float | None:
        step = step_ms(result.record)
        return 1e3 * result.case.batch / step.median if step else None

    changed = [
        name
        for name in ("attention", "checkpoint")
        if any(getattr(result.case, name) != AS_IS for result in results)
    ]
    return table(
        "own-settings",
        "Settings of your model",
        results,
        [
            col("model", lambda r: r.case.model, key=True),
            col("batch", lambda r: r.case.batch, "count", key=True),
            col("dtype", lambda r: r.case.dtype, key=True),
            col("compile", lambda r: r.case.compile, key=True),
            col("optimizer", lambda r: r.case.optimizer, key=True),
            *(col(name, lambda r, name=name: getattr(r.case, name), key=True) for name in changed),
            col(
                "step",
                lambda r: interval(step_ms(r.record)),
                unit="ms",
                hint="median with its 95 % interval",
            ),
            col("forward", lambda r: median_ms(r.record, "forward"), unit="ms"),
            col("backward", lambda r: median_ms(r.record, "backward"), unit="ms"),
            col(
                "update",
                lambda r: median_ms(r.record, "optimizer"),
                unit="ms",
                hint="phase of the optimizer",
            ),
            col("samples/s", samples, "number"),
            col(
                "FLOP/s",
                lambda r: achieved_flops(r.record),
                "rate",
                unit="FLOP/s",
                hint="FLOPs counted by operator in an eager step",
            ),
            col("MFU", lambda r: mfu(r.record), "percent"),
            col("peak memory", lambda r: r.record.quantity("peak_bytes"), "bytes"),
        ],
    )
