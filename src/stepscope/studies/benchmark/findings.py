"""What the benchmark says, in sentences that carry their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from stepscope.analysis.group_lints import lint_group
from stepscope.analysis.limits import (
    achieved_flops,
    host_bound,
    matrix_ceiling,
    median_ms,
    mfu,
    phase_sums,
    tokens_per_second,
)
from stepscope.analysis.lints import PHASES_OFF, lint_record
from stepscope.records.stats import summarize
from stepscope.report.blocks import Finding
from stepscope.report.format import count, duration, number, percent, rate
from stepscope.studies.benchmark.formats import formats_findings
from stepscope.studies.benchmark.rows import Row, is_steady
from stepscope.studies.energy_view import energy_finding

_AS_EXPECTED = 0.15
"""A ratio this near to 2 needs no explanation."""
_SEVERAL = 3


def benchmark_findings(rows: Sequence[Row]) -> tuple[Finding, ...]:
    return tuple(
        finding
        for make in (
            _distance_from_the_limit,
            _backward_over_forward,
            _who_limits,
            formats_findings,
            _energy,
            _phases_against_whole,
            _failures,
            _doubts,
        )
        for finding in make(rows)
    )


def _energy(rows: Sequence[Row]) -> Iterator[Finding]:
    for row in rows:
        if row.step_record is not None:
            yield from energy_finding(row.step_record, row.name)


def _distance_from_the_limit(rows: Sequence[Row]) -> Iterator[Finding]:
    """The step that comes nearest to the ceiling, and the one that stays farthest away."""
    judged = [(mfu(row.step_record) or 0.0, row) for row in rows if row.step_record]
    judged = [(share, row) for share, row in judged if share]
    if not judged:
        return
    best, row = max(judged, key=lambda pair: pair[0])
    record, step = row.step_record, row.step
    assert record is not None
    assert step is not None
    ceiling = matrix_ceiling(record)
    assert ceiling is not None
    steady = is_steady(record)
    text = (
        f"The training step that comes nearest to the limit is {row.name}:"
        f" {duration(step.median)} (95 % interval {duration(step.low)} to {duration(step.high)},"
        f" {'steady' if steady else 'not steady'}),"
        f" {count(tokens_per_second(record) or 0)} tokens/s,"
        f" {rate(achieved_flops(record) or 0, 'FLOP/s')}. That is {percent(best)} of the"
        f" {rate(ceiling.value, 'FLOP/s')} that matrix products alone reach here"
    )
    worst, far = min(judged, key=lambda pair: pair[0])
    if far is not row and far.step_record is not None:
        doubt = "" if is_steady(far.step_record) else " (not steady)"
        text += f"; the farthest is {far.name} with {percent(worst)}{doubt}"
    yield Finding(text=text + ".", tone="good" if best >= 0.4 and steady else "info")


def _backward_over_forward(rows: Sequence[Row]) -> Iterator[Finding]:
    """Against the 2:1 of the FLOPs, by size, at the longest context that was measured."""
    by_size: dict[tuple[str, str], Row] = {}
    for row in _of_one_variant(rows):
        work = row.workload
        key = (f"{work.table} {work.size}" if work.table != "2025" else work.size, work.dtype)
        if row.ratio is not None and (
            key not in by_size or row.workload.context > by_size[key].workload.context
        ):
            by_size[key] = row
    if not by_size:
        return
    several = len({dtype for _, dtype in by_size}) > 1

    def listed(*, steady: bool) -> str:
        return ", ".join(
            f"{size}{f' {dtype}' if several else ''} {number(row.ratio or 0, 3)}"
            for (size, dtype), row in by_size.items()
            if row.ratio_is_steady is steady
        )

    text = "Backward over forward, where the FLOPs say 2:"
    steady = [row for row in by_size.values() if row.ratio_is_steady]
    shaky = listed(steady=False)
    if not steady:
        text += f" {shaky}. The samples are not steady, so no cause is given."
    else:
        off = max(steady, key=lambda row: abs((row.ratio or 2.0) - 2.0))
        assert off.ratio is not None
        expected = abs(off.ratio - 2.0) <= 2 * _AS_EXPECTED
        why = "The FLOPs explain it." if expected else _why_the_ratio_departs(off)
        text += f" {listed(steady=True)}. {why}"
        text += f" Not steady, so no cause is given: {shaky}." if shaky else ""
    yield Finding(text=text)


def _of_one_variant(rows: Sequence[Row]) -> list[Row]:
    """Rows that differ in size, context and format alone: those like the first one."""

    def variant(row: Row) -> tuple[object, ...]:
        work = row.workload
        return (work.attention, work.compile, work.batch, tuple(work.overrides.items()))

    return [row for row in rows if variant(row) == variant(rows[0])]


def _why_the_ratio_departs(row: Row) -> str:
    """The ratio of times is the ratio of FLOPs times that of the two efficiencies."""
    assert row.forward is not None
    assert row.backward is not None
    record = next(record for record in row.records if record.status == "ok")
    share = host_bound(row.by_mode.get("forward-backward", record))
    if share is not None and share.bound:
        return (
            f"For {row.name} the host is the limit ({percent(share.fraction)} of the step ends with"
            " an empty launch queue), so time follows the number of launches, not the FLOPs."
        )
    if row.flops is None:
        return ""
    forward = row.flops.forward / row.forward.median * 1e3
    backward = row.flops.backward / row.backward.median * 1e3
    better, worse = ("backward", "forward") if backward > forward else ("forward", "backward")
    return (
        f"For {row.name} the forward runs at {rate(forward, 'FLOP/s')} and the backward at"
        f" {rate(backward, 'FLOP/s')}: the {worse} spends a larger share of its time outside of"
        f" matrix products (copies, elementwise work, memory that is touched for the first time),"
        f" the {better} a smaller one."
    )


def _who_limits(rows: Sequence[Row]) -> Iterator[Finding]:
    """Whether the device is idle while the host launches."""
    shares = [
        (share, row, record)
        for row in rows
        for record in row.records
        if record.status == "ok" and (share := host_bound(record)) is not None
    ]
    if not shares:
        return
    bound = [(row, record) for share, row, record in shares if share.bound]
    if not bound:
        steady = all(is_steady(record) for _, _, record in shares)
        yield Finding(
            text="The GPU, not the host, limits every step: the launch queue never runs empty for"
            " most of one.",
            tone="good" if steady else "info",
        )
        return
    names = list(dict.fromkeys(row.name for row, _ in bound))
    yield Finding(
        text=f"The host limits {len(bound)} of {len(shares)} steps: their launch queue runs empty,"
        f" so the GPU waits for the host ({_some(names)}). A faster number format cannot help"
        " there; more work per launch can (a larger batch or context, torch.compile, CUDA graphs).",
        tone="warn",
    )


def _phases_against_whole(rows: Sequence[Row]) -> Iterator[Finding]:
    """Steps with marks between the phases against steps without."""
    off = [
        (abs(summarize(sums).median / whole - 1.0), row, record)
        for row in rows
        for record in row.records
        if (whole := median_ms(record, "step")) and (sums := phase_sums(record))
    ]
    if not off:
        return
    worst, row, record = max(off, key=lambda found: found[0])
    middle = sorted(value for value, _, _ in off)[len(off) // 2]
    close = sum(value <= PHASES_OFF for value, _, _ in off)
    steady = all(is_steady(one) for _, _, one in off)
    said = "add up to the step that was timed as one"
    if not close:
        said = "do not add up to the step that was timed as one"
    elif close < len(off):
        said += f" within {percent(PHASES_OFF)} in {close} of {len(off)} cases"
    doubt = "" if is_steady(record) else ", whose samples are not steady"
    yield Finding(
        text=f"The phases {said}: {percent(middle)} apart in the middle of {len(off)},"
        f" {percent(worst)} at most ({row.name}, {record.config['mode']}{doubt}).",
        tone="good" if close == len(off) and steady else "info",
    )


def _failures(rows: Sequence[Row]) -> Iterator[Finding]:
    failed = [(row, record) for row in rows for record in row.records if record.status != "ok"]
    for status in dict.fromkeys(record.status for _, record in failed):
        names = [
            f"{row.name} {record.config['mode']}"
            for row, record in failed
            if record.status == status
        ]
        what = {"oom": "ran out of memory", "skipped": "skipped", "timeout": "timed out"}
        noun = "case" if len(names) == 1 else "cases"
        first = next(record.reason for _, record in failed if record.status == status)
        yield Finding(
            text=f"{len(names)} {noun} {what.get(status, 'failed')}: {_some(names)}."
            f" The first said: {first}",
            tone="warn",
        )


def _doubts(rows: Sequence[Row]) -> Iterator[Finding]:
    """Lints, by code: a number that breaks a law of physics is not to be believed."""
    records = [record for row in rows for record in row.records]
    grouped = lint_group(records)
    # Judged anew: a record may be older than a lint.
    lints = [
        lint for record in records for lint in (*lint_record(record), *grouped.get(record.id, ()))
    ]
    counted = Counter(lint.code for lint in lints)
    for code, times in counted.items():
        first = next(lint.message for lint in lints if lint.code == code)
        yield Finding(text=f"Lint {code}, {times}×, first: {first}", tone="warn", timed=False)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SEVERAL
    return ", ".join(names[:_SEVERAL]) + (f" and {more} more" if more > 0 else "")
