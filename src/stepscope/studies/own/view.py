"""Tables and figures of one's own model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from stepscope.analysis.limits import achieved_flops, median_ms, mfu, step_ms
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Cell, Column, Finding, Interval, Table
from stepscope.report.format import bytes_, duration, number
from stepscope.studies.energy_view import energy_finding
from stepscope.studies.inspected.findings import memory_finding, rate_finding
from stepscope.studies.inspected.rows import Watched
from stepscope.studies.inspected.view import account_blocks, trace_parts
from stepscope.studies.inspected.waterfall import waterfall_blocks
from stepscope.studies.own import OwnCase
from stepscope.studies.trace_findings import trace_findings


def own_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    sound = [record for record in records if record.status == "ok"]
    lost = [record for record in records if record.status != "ok"]
    blocks: list[Block] = [*_changes(sound)]
    if sound:
        lead = Watched(sound[0])
        if lead.summary is not None:
            blocks += trace_findings(lead.summary, lead.step_ms)
        blocks += [*memory_finding(lead), *rate_finding(lead)]
        blocks += energy_finding(sound[0], sound[0].config["model"])
        blocks += [settings_table(sound)] if len(sound) > 1 else []
        blocks += waterfall_blocks(lead, "own")
        blocks += [*trace_parts(lead, "own"), *account_blocks(lead)]
    if lost:
        blocks.append(_lost_table(lost))
    return tuple(blocks)


def _changes(sound: Sequence[Record]) -> Iterator[Finding]:
    """The first case against those that differ from it in one setting."""
    if len(sound) < 2:
        return
    first = sound[0]
    base = step_ms(first)
    for record in sound[1:]:
        differ = [
            name for name in OwnCase.__struct_fields__ if record.config[name] != first.config[name]
        ]
        other = step_ms(record)
        if len(differ) != 1 or differ == ["model"] or base is None or other is None:
            continue
        setting = differ[0]
        faster = base.median / other.median
        per = ""
        if setting == "batch":
            faster *= record.config["batch"] / first.config["batch"]
            per = " for each sample"
        peaks = first.quantity("peak_bytes"), record.quantity("peak_bytes")
        memory = (
            f", and its peak goes from {bytes_(peaks[0])} to {bytes_(peaks[1])}"
            if peaks[0] and peaks[1]
            else ""
        )
        yield Finding(
            text=f"With {setting} {record.config[setting]} instead of {first.config[setting]} a"
            f" step takes {duration(other.median)} instead of {duration(base.median)}:"
            f" {number(faster, 3)}× the speed{per}{memory}.",
            tone="good" if faster > 1 else "info",
        )


def settings_table(records: Sequence[Record]) -> Table:
    changed = [
        name
        for name in ("attention", "checkpoint")
        if any(record.config.get(name, "as-is") != "as-is" for record in records)
    ]

    def row(record: Record) -> tuple[Cell, ...]:
        case = msgspec.convert(record.config, OwnCase)
        key = (case.model, case.batch, case.dtype, case.compile, case.optimizer,
               *(record.config.get(name, "as-is") for name in changed))  # fmt: skip
        if record.status != "ok":
            return (*key, record.status, *[None] * 8)
        timed = step_ms(record)
        return (
            *key,
            Interval(value=timed.median, low=timed.low, high=timed.high) if timed else None,
            *(median_ms(record, phase) for phase in ("forward", "backward", "optimizer")),
            1e3 * case.batch / timed.median if timed else None,
            achieved_flops(record),
            mfu(record),
            record.quantity("peak_bytes"),
            record.quantity("joules"),
        )

    ms = {"kind": "number", "unit": "ms"}
    return Table(
        name="own-settings",
        title="Your model with each setting",
        columns=(
            Column(title="model"),
            Column(title="batch", kind="count"),
            Column(title="dtype"),
            Column(title="compile"),
            Column(title="optimizer"),
            *(Column(title=name) for name in changed),
            Column(title="step", **ms, hint="median with its 95 % interval"),  # type: ignore[arg-type]
            Column(title="forward", **ms),  # type: ignore[arg-type]
            Column(title="backward", **ms),  # type: ignore[arg-type]
            Column(title="update", **ms, hint="the optimizer's phase"),  # type: ignore[arg-type]
            Column(title="samples/s", kind="number"),
            Column(title="FLOP/s", kind="rate", unit="FLOP/s", hint="counted by operator, eager"),
            Column(title="MFU", kind="percent"),
            Column(title="peak memory", kind="bytes"),
            Column(title="energy", kind="number", unit="J", hint="of a step, where it is counted"),
        ),
        rows=tuple(row(record) for record in records),
    )


def _lost_table(lost: Sequence[Record]) -> Table:
    return Table(
        name="own-lost",
        title="Cases without a result",
        columns=(Column(title="case"), Column(title="status"), Column(title="reason")),
        rows=tuple((record.case, record.status, record.reason) for record in lost),
    )
