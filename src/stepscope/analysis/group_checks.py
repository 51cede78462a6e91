"""Checks of records against each other: cases that differ in a single setting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from stepscope.analysis.limits import host_bound, step_ms
from stepscope.records.schema import FailedCheck, Record

Complaint = tuple[Record, str]
GroupCheck = Callable[[Sequence[Record]], Iterator[Complaint]]

FLOPS_GROWN = 2.0
TIME_FLAT = 0.10

GROUP_CHECKS: dict[str, GroupCheck] = {}


def check_group(records: Sequence[Record]) -> dict[str, tuple[FailedCheck, ...]]:
    """Return failed checks that need several records, by the id of the record they are about."""
    sound = [record for record in records if record.status == "ok"]
    failed_by_record: dict[str, dict[str, FailedCheck]] = defaultdict(dict)
    for code, check in GROUP_CHECKS.items():
        for record, message in check(sound):
            failed_by_record[record.id].setdefault(code, FailedCheck(code=code, message=message))
    return {record_id: tuple(failed.values()) for record_id, failed in failed_by_record.items()}


def _check(code: str) -> Callable[[GroupCheck], GroupCheck]:
    def register(check: GroupCheck) -> GroupCheck:
        GROUP_CHECKS[code] = check
        return check

    return register


@_check("flat-in-size")
def _flat_in_size(records: Sequence[Record]) -> Iterator[Complaint]:
    for varied in ("size", "context"):
        for group in _alike_but_for(varied, records):
            yield from _flat_in(group, varied)


def _flat_in(group: Sequence[Record], varied: str) -> Iterator[Complaint]:
    measured = [
        (flops, step.median, record)
        for record in group
        if (flops := record.quantity("flops")) and (step := step_ms(record))
    ]
    measured.sort(key=lambda entry: entry[0])
    for flops, time, record in measured:
        smaller = [entry for entry in measured if entry[0] * FLOPS_GROWN <= flops]
        if not smaller or abs(time / smaller[-1][1] - 1.0) >= TIME_FLAT:
            continue
        base_flops, base_time, base = smaller[-1]
        share = host_bound(record)
        cause = (
            f"{share.fraction:.0%} of the step ends with an empty launch queue, so launches are"
            " the likely limit; use a larger batch, compile, or capture a graph"
            if share and share.bound
            else "check that all work is executed and synchronized before the clock stops"
        )
        yield (
            record,
            f"{flops / base_flops:.2g} times the FLOPs of {varied} {base.config[varied]} take"
            f" {time / base_time:.2f} times its time ({time:.4g} and {base_time:.4g} ms): {cause}",
        )


@_check("forward-peak-above-step")
def _forward_peak_above_step(records: Sequence[Record]) -> Iterator[Complaint]:
    for group in _alike_but_for("mode", records):
        peaks = {record.config["mode"]: record for record in group}
        forward, step = peaks.get("forward"), peaks.get("train-step")
        forward_peak = forward and forward.quantity("peak_bytes")
        step_peak = step and step.quantity("peak_bytes")
        if forward and forward_peak and step_peak and forward_peak > step_peak:
            yield (
                forward,
                f"forward alone peaks at {forward_peak / 2**20:.5g} MiB, the full step at"
                f" {step_peak / 2**20:.5g} MiB: memory of an earlier case was still allocated, or"
                " the peak was not reset; measure this case in a fresh process",
            )


def _alike_but_for(varied: str, records: Sequence[Record]) -> list[list[Record]]:
    """Group records of one study and device model that differ only in this config entry."""
    groups: dict[bytes, list[Record]] = defaultdict(list)
    for record in records:
        if varied in record.config:
            rest = {name: value for name, value in record.config.items() if name != varied}
            like = (record.study, record.environment.device_name, rest)
            groups[msgspec.json.encode(like, order="deterministic")].append(record)
    return list(groups.values())
