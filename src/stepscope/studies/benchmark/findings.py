"""Findings of the benchmark study."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stepscope.analysis.checks import PHASES_OFF, check_record
from stepscope.analysis.group_checks import check_group
from stepscope.analysis.limits import (
    achieved_flops,
    host_bound,
    matrix_ceiling,
    median_ms,
    mfu,
    phase_sums,
    tokens_per_second,
)
from stepscope.errors import some
from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.report.blocks import Finding
from stepscope.report.format import count, duration, number, percent, rate
from stepscope.studies.benchmark.rows import BenchmarkRow, DtypePair, is_steady, pairs_of
from stepscope.studies.views.builders import failure_findings, finding, grouped
from stepscope.studies.views.energy import energy_finding
from stepscope.studies.views.verdict import limit_share, step_limit

_AS_EXPECTED = 0.3
"""Largest distance from 2 at which a ratio needs no explanation."""
_GAIN = 1.1
"""Smallest gain that counts: two runs differ by less."""


def benchmark_findings(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    yield from _distance_from_the_limit(rows)
    yield from _backward_over_forward(rows)
    yield from _cpu_bound(rows)
    yield from dtype_findings(rows)
    for row in rows:
        if row.step_record is not None:
            yield from energy_finding(row.step_record, row.name)
    yield from _phases_against_step(rows)
    yield from _failures(rows)
    yield from _checks(rows)


class _Near(NamedTuple):
    """A training step and its distance from the limit."""

    share: float
    row: BenchmarkRow
    record: Record


def _distance_from_the_limit(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    """The step that comes closest to the hardware limit, and the one that is farthest from it. The
    limit of a user's model is unknown: MFU takes its place if no step has a limit."""
    steps = [(row, record) for row in rows if (record := row.step_record) is not None]
    known = [
        _Near(share, row, record)
        for row, record in steps
        if (share := limit_share(record, row.workload))
    ]
    limited = bool(known)
    known = known or [_Near(share, row, record) for row, record in steps if (share := mfu(record))]
    if not known:
        return
    best, far = max(known, key=lambda one: one.share), min(known, key=lambda one: one.share)
    row, record = best.row, best.record
    step, flops, steady = row.step, achieved_flops(record) or 0, is_steady(record)
    assert step is not None
    ceiling, utilization = matrix_ceiling(record), mfu(record)
    limit, basis = step_limit(record, row.workload), ""
    if limit is not None:
        own = f" (MFU in {row.workload.dtype}: {percent(utilization)})" if utilization else ""
        basis = f"limit, {duration(limit.ms)} with {limit.dtype} matmuls{own}"
    elif ceiling is not None:
        basis = f"{rate(ceiling.value, 'FLOP/s')} that a matmul alone reaches here"
    farthest = ""
    if far.row is not row:
        doubt = "" if is_steady(far.record) else " (not steady)"
        farthest = f"; the farthest is {far.row.name} with {percent(far.share)}{doubt}"
    values: dict[str, str | float | bool] = {
        "nearest": row.name,
        "step_ms": step.median,
        "flops_per_s": flops,
        "share": best.share,
        "steady": steady,
        "farthest": far.row.name,
        "farthest_share": far.share,
    }
    if ceiling is not None:
        values["ceiling"] = ceiling.value
    if utilization is not None:
        values["mfu"] = utilization
    if limit is not None:
        values |= {"limit_ms": limit.ms, "limit_dtype": limit.dtype}
    yield finding(
        "benchmark.distance-from-limit",
        f"The training step closest to the {'hardware limit' if limited else 'ceiling'} is"
        f" {row.name}: {duration(step.median)} (95 % interval {duration(step.low)} to"
        f" {duration(step.high)}, {'steady' if steady else 'not steady'}),"
        f" {count(tokens_per_second(record) or 0)} tokens/s, {rate(flops, 'FLOP/s')}.",
        [one.record for one in known],
        values,
        conclusion=f"That is {percent(best.share)} of the {basis}{farthest}.",
        tone="good" if best.share >= 0.4 and steady else "info",
    )


def _backward_over_forward(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    """The ratio by size against the 2:1 of the FLOPs, at the longest context that was measured."""
    by_size: dict[tuple[str, str], BenchmarkRow] = {}
    for row in _of_one_variant(rows):
        work = row.workload
        key = (f"{work.table} {work.size}" if work.table != "2025" else work.size, work.dtype)
        if row.ratio is not None and (
            key not in by_size or work.context > by_size[key].workload.context
        ):
            by_size[key] = row
    if not by_size:
        return
    several = len({dtype for _, dtype in by_size}) > 1
    ratios = {f"{size}{f' {dtype}' * several}": row for (size, dtype), row in by_size.items()}

    def listed(*, steady: bool) -> str:
        return ", ".join(
            f"{name} {number(row.ratio or 0, 3)}"
            for name, row in ratios.items()
            if row.ratio_is_steady is steady
        )

    steady, shaky = listed(steady=True), listed(steady=False)
    text, why = f"{shaky}. The samples are not steady, so no cause is given.", ""
    if steady:
        text, why = f"{steady}.", _why_the_ratio_departs(list(ratios.values()))
        why += f" Not steady, so no cause is given: {shaky}." if shaky else ""
    yield finding(
        "benchmark.backward-over-forward",
        f"Backward pass over forward pass (2 by FLOPs): {text}",
        [
            source[0]
            for row in ratios.values()
            for part in ("forward", "backward")
            if (source := row.source(part)) is not None
        ],
        {name: row.ratio for name, row in ratios.items()},
        conclusion=why.strip(),
    )


def _of_one_variant(rows: Sequence[BenchmarkRow]) -> list[BenchmarkRow]:
    """The rows that differ from the first one in size, context and dtype alone."""

    def variant(row: BenchmarkRow) -> tuple[object, ...]:
        work = row.workload
        return (work.attention, work.compile, work.batch, tuple(work.overrides.items()))

    return [row for row in rows if variant(row) == variant(rows[0])]


def _why_the_ratio_departs(rows: Sequence[BenchmarkRow]) -> str:
    """Explain the ratio of times: the ratio of FLOPs times that of the two rates."""
    row = max(
        (row for row in rows if row.ratio_is_steady), key=lambda row: abs((row.ratio or 2.0) - 2.0)
    )
    backward = row.source("backward")
    assert row.ratio is not None
    assert row.forward is not None
    assert row.backward is not None
    assert backward is not None
    if abs(row.ratio - 2.0) <= _AS_EXPECTED:
        return "The FLOPs explain it."
    share = host_bound(backward[0])
    if share is not None and share.bound:
        return (
            f"{row.name} is CPU-bound ({percent(share.fraction)} of the step ends with an empty"
            " launch queue), so time follows the number of launches, not the FLOPs."
        )
    if row.flops is None:
        return ""
    forward_rate = row.flops.forward / row.forward.median * 1e3
    backward_rate = row.flops.backward / row.backward.median * 1e3
    faster = backward_rate > forward_rate
    better, worse = ("backward", "forward") if faster else ("forward", "backward")
    return (
        f"For {row.name} the forward pass runs at {rate(forward_rate, 'FLOP/s')} and the backward"
        f" pass at {rate(backward_rate, 'FLOP/s')}: the {worse} pass spends a larger share of its"
        " time outside matmuls (copies, elementwise work, memory that is touched for the first"
        f" time), the {better} pass a smaller one."
    )


def _cpu_bound(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    """Steps in which the GPU is idle while the CPU launches."""
    shares = [
        (share, row, record)
        for row in rows
        for record in row.done
        if (share := host_bound(record)) is not None
    ]
    if not shares:
        return
    records = [record for _, _, record in shares]
    bound = [row.name for share, row, _ in shares if share.bound]
    if not bound:
        yield finding(
            "benchmark.device-limits",
            "No step is CPU-bound: none has an empty launch queue for most of its time.",
            records,
            {"steps": len(shares)},
            tone="good" if all(map(is_steady, records)) else "info",
        )
        return
    names = some(list(dict.fromkeys(bound)))
    yield finding(
        "benchmark.host-limits",
        f"{len(bound)} of {len(shares)} steps are CPU-bound: their launch queue runs empty, so the"
        f" GPU waits for the CPU ({names}).",
        records,
        {"steps": len(bound), "of": len(shares), "names": names},
        conclusion="A faster dtype cannot help there; more work per launch can (a larger batch or"
        " context, torch.compile, CUDA graphs).",
        tone="warn",
    )


def dtype_findings(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    """Speedup of each dtype over float32.

    A CPU-bound step takes as long in any dtype: the GPU waits for launches, and autocast adds some.
    """
    for dtype, pairs in grouped(pairs_of(rows), lambda pair: pair.workload.dtype).items():
        low = min(pairs, key=lambda pair: pair.speedup or 0.0)
        high = max(pairs, key=lambda pair: pair.speedup or 0.0)
        least = ""
        if low is not high:
            least = f" and {number(low.speedup or 0.0, 3)}× on {low.name}{_by_phase(low)}"
        useless = [pair for pair in pairs if (pair.speedup or 0.0) < _GAIN]
        yield finding(
            "benchmark.dtype-gain",
            f"{dtype} instead of float32 makes the step {number(high.speedup or 0.0, 3)}× as fast"
            f" on {high.name}{_by_phase(high)}{least}.",
            [record for pair in pairs for row in pair for record in row.done],
            {
                "dtype": dtype,
                "most": high.speedup,
                "most_on": high.name,
                "least": low.speedup,
                "least_on": low.name,
                "without_gain": len(useless),
            },
            conclusion=" ".join(_why_no_gain(useless)),
            tone="warn" if useless else "info",
        )


def _by_phase(pair: DtypePair) -> str:
    gains = [
        f"{phase} {number(gain, 3)}×"
        for phase in ("forward", "backward", "optimizer")
        if (gain := pair.gain(phase)) is not None
    ]
    return f" ({', '.join(gains)})" if len(gains) > 1 else ""


def _why_no_gain(useless: Sequence[DtypePair]) -> Iterator[str]:
    """The steps that a dtype does not speed up, by what limits them."""
    waiting = {
        pair: pair.host.fraction for pair in useless if pair.host is not None and pair.host.bound
    }
    others = [pair for pair in useless if pair not in waiting]
    if waiting:
        yield (
            f"It does not help {_names(waiting)}: these steps are CPU-bound (at least"
            f" {percent(min(waiting.values()))} of each ends with an empty launch queue), so faster"
            " kernels only make the GPU wait longer, and autocast's casts are additional launches."
        )
    if others:
        on_cpu = any(pair.row.records[0].environment.device_kind == "cpu" for pair in others)
        why = (
            ": this CPU has no faster unit for the dtype, or none at all."
            if on_cpu
            else ", not CPU-bound: what the matmuls gain is lost in casts and in operators that"
            " move as many bytes as before."
        )
        yield f"It does not help {_names(others)}{why}"


def _names(pairs: Iterable[DtypePair]) -> str:
    return some(list(dict.fromkeys(pair.name for pair in pairs)), 8)


def _phases_against_step(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    """Compare the sum of the phases with steps that have no marks between them."""
    off = [
        (abs(summarize(sums).median / step - 1.0), f"{row.name}, {mode}", record)
        for row in rows
        for mode, record in row.by_mode.items()
        if (step := median_ms(record, "step")) and (sums := phase_sums(record))
    ]
    if not off:
        return
    worst, name, record = max(off, key=lambda entry: entry[0])
    middle = sorted(value for value, _, _ in off)[len(off) // 2]
    close = sum(value <= PHASES_OFF for value, _, _ in off)
    records = [entry[2] for entry in off]
    agreement = "add up to the step that was timed as one"
    if not close:
        agreement = "do not add up to the step that was timed as one"
    elif close < len(off):
        agreement += f" within {percent(PHASES_OFF)} in {close} of {len(off)} cases"
    doubt = "" if is_steady(record) else ", whose samples are not steady"
    yield finding(
        "benchmark.phases-sum",
        f"The phases {agreement}: {percent(middle)} apart in the median of {len(off)},"
        f" {percent(worst)} at most ({name}{doubt}).",
        records,
        {"close": close, "of": len(off), "middle": middle, "worst": worst, "case": name},
        tone="good" if close == len(off) and all(map(is_steady, records)) else "info",
    )


def _failures(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    named = [(f"{row.name} {mode}", record) for row in rows for mode, record in row.by_mode.items()]
    yield from failure_findings("benchmark.failed", named)


def _checks(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    """Failed checks by code. They are run again, because a record may be older than a check."""
    records = [record for row in rows for record in row.records]
    of_groups = check_group(records)
    failed = [
        (check, record)
        for record in records
        for check in (*check_record(record), *of_groups.get(record.id, ()))
    ]
    for code, members in grouped(failed, lambda pair: pair[0].code).items():
        yield finding(
            "benchmark.failed-check",
            f"Check {code} failed {len(members)}×, first: {members[0][0].message}",
            [record for _, record in members],
            {"check": code, "times": len(members)},
            tone="warn",
            timed=False,
        )
