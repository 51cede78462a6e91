"""Findings of the benchmark study."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.report.blocks import Finding
from stepscope.report.format import count, duration, number, percent, rate
from stepscope.studies.benchmark.rows import Pair, Row, is_steady, pairs_of
from stepscope.studies.views.energy import energy_finding

_AS_EXPECTED = 0.3
"""Largest distance from 2 at which a ratio needs no explanation."""
_GAIN = 1.1
"""Smallest gain that counts: two runs differ by less."""
_FAILED = {"oom": "ran out of memory", "skipped": "skipped", "timeout": "timed out"}


def benchmark_findings(rows: Sequence[Row]) -> Iterator[Finding]:
    yield from _distance_from_the_limit(rows)
    yield from _backward_over_forward(rows)
    yield from _who_limits(rows)
    yield from formats_findings(rows)
    for row in rows:
        if row.step_record is not None:
            yield from energy_finding(row.step_record, row.name)
    yield from _phases_against_step(rows)
    yield from _failures(rows)
    yield from _lints(rows)


def _distance_from_the_limit(rows: Sequence[Row]) -> Iterator[Finding]:
    """The step that comes closest to the ceiling, and the one that is farthest from it."""
    judged = [
        (share, row, record)
        for row in rows
        if (record := row.step_record) is not None and (share := mfu(record))
    ]
    if not judged:
        return
    best, row, record = max(judged, key=lambda one: one[0])
    worst, far, far_record = min(judged, key=lambda one: one[0])
    step, ceiling, flops = row.step, matrix_ceiling(record), achieved_flops(record) or 0
    assert step is not None
    assert ceiling is not None
    steady = is_steady(record)
    farthest = ""
    if far is not row:
        doubt = "" if is_steady(far_record) else " (not steady)"
        farthest = f"; the farthest is {far.name} with {percent(worst)}{doubt}"
    yield Finding(
        code="benchmark.distance-from-limit",
        values={
            "nearest": row.name,
            "step_ms": step.median,
            "flops_per_s": flops,
            "ceiling": ceiling.value,
            "share": best,
            "steady": steady,
            "farthest": far.name,
            "farthest_share": worst,
        },
        records=_ids(one for _, _, one in judged),
        text=f"The training step closest to the limit is {row.name}:"
        f" {duration(step.median)} (95 % interval {duration(step.low)} to {duration(step.high)},"
        f" {'steady' if steady else 'not steady'}),"
        f" {count(tokens_per_second(record) or 0)} tokens/s, {rate(flops, 'FLOP/s')}.",
        conclusion=f"That is {percent(best)} of the {rate(ceiling.value, 'FLOP/s')} that a matmul"
        f" alone reaches here{farthest}.",
        tone="good" if best >= 0.4 and steady else "info",
    )


def _backward_over_forward(rows: Sequence[Row]) -> Iterator[Finding]:
    """The ratio by size against the 2:1 of the FLOPs, at the longest context that was measured."""
    by_size: dict[tuple[str, str], Row] = {}
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
    ratios = {
        f"{size}{f' {dtype}' if several else ''}": row for (size, dtype), row in by_size.items()
    }

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
    yield Finding(
        code="benchmark.backward-over-forward",
        values={name: row.ratio for name, row in ratios.items()},
        records=_ids(
            source[0]
            for row in ratios.values()
            for part in ("forward", "backward")
            if (source := row.source(part)) is not None
        ),
        text=f"Backward over forward (2 by FLOPs): {text}",
        conclusion=why.strip(),
    )


def _of_one_variant(rows: Sequence[Row]) -> list[Row]:
    """The rows that differ from the first one in size, context and dtype alone."""

    def variant(row: Row) -> tuple[object, ...]:
        work = row.workload
        return (work.attention, work.compile, work.batch, tuple(work.overrides.items()))

    return [row for row in rows if variant(row) == variant(rows[0])]


def _why_the_ratio_departs(rows: Sequence[Row]) -> str:
    """Explain the ratio of times: the ratio of FLOPs times that of the two efficiencies."""
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
            f"For {row.name} the host is the limit ({percent(share.fraction)} of the step ends with"
            " an empty launch queue), so time follows the number of launches, not the FLOPs."
        )
    if row.flops is None:
        return ""
    forward_rate = row.flops.forward / row.forward.median * 1e3
    backward_rate = row.flops.backward / row.backward.median * 1e3
    faster = backward_rate > forward_rate
    better, worse = ("backward", "forward") if faster else ("forward", "backward")
    return (
        f"For {row.name} the forward runs at {rate(forward_rate, 'FLOP/s')} and the backward at"
        f" {rate(backward_rate, 'FLOP/s')}: the {worse} spends a larger share of its time outside"
        " matmuls (copies, elementwise work, memory that is touched for the first time),"
        f" the {better} a smaller one."
    )


def _who_limits(rows: Sequence[Row]) -> Iterator[Finding]:
    """Steps in which the device is idle while the host launches."""
    shares = [
        (share, row, record)
        for row in rows
        for record in row.done
        if (share := host_bound(record)) is not None
    ]
    if not shares:
        return
    records = _ids(record for _, _, record in shares)
    bound = [row.name for share, row, _ in shares if share.bound]
    if not bound:
        yield Finding(
            code="benchmark.device-limits",
            values={"steps": len(shares)},
            records=records,
            text="The GPU, not the host, limits every step: no step has an empty launch queue for"
            " most of its time.",
            tone="good" if all(is_steady(record) for _, _, record in shares) else "info",
        )
        return
    names = _some(bound)
    yield Finding(
        code="benchmark.host-limits",
        values={"steps": len(bound), "of": len(shares), "names": names},
        records=records,
        text=f"The host limits {len(bound)} of {len(shares)} steps: their launch queue runs empty,"
        f" so the GPU waits for the host ({names}).",
        conclusion="A faster dtype cannot help there; more work per launch can (a larger batch or"
        " context, torch.compile, CUDA graphs).",
        tone="warn",
    )


def formats_findings(rows: Sequence[Row]) -> Iterator[Finding]:
    """Speedup of each dtype over float32.

    A step that the host limits takes as long in any dtype: the device waits for launches, and
    autocast adds some.
    """
    by_dtype: dict[str, list[Pair]] = {}
    for pair in pairs_of(rows):
        by_dtype.setdefault(pair.workload.dtype, []).append(pair)
    for dtype, pairs in by_dtype.items():
        low = min(pairs, key=lambda pair: pair.speedup or 0.0)
        high = max(pairs, key=lambda pair: pair.speedup or 0.0)
        least = ""
        if low is not high:
            least = f" and {number(low.speedup or 0.0, 3)}× on {low.name}{_by_phase(low)}"
        useless = [pair for pair in pairs if (pair.speedup or 0.0) < _GAIN]
        yield Finding(
            code="benchmark.dtype-gain",
            values={
                "dtype": dtype,
                "most": high.speedup,
                "most_on": high.name,
                "least": low.speedup,
                "least_on": low.name,
                "without_gain": len(useless),
            },
            records=_ids(record for pair in pairs for row in pair for record in row.done),
            text=f"{dtype} against float32 makes the step {number(high.speedup or 0.0, 3)}× as fast"
            f" on {high.name}{_by_phase(high)}{least}.",
            conclusion=" ".join(_why_no_gain(useless)),
            tone="warn" if useless else "info",
        )


def _by_phase(pair: Pair) -> str:
    gains = [
        f"{phase} {number(gain, 3)}×"
        for phase in ("forward", "backward", "optimizer")
        if (gain := pair.gain(phase)) is not None
    ]
    return f" ({', '.join(gains)})" if len(gains) > 1 else ""


def _why_no_gain(useless: Sequence[Pair]) -> Iterator[str]:
    """The steps that a dtype does not speed up, by what limits them."""
    waiting = {
        pair: pair.host.fraction for pair in useless if pair.host is not None and pair.host.bound
    }
    others = [pair for pair in useless if pair not in waiting]
    if waiting:
        yield (
            f"It does not help {_some((pair.name for pair in waiting), 8)}: the host limits these"
            f" steps (at least {percent(min(waiting.values()))} of each ends with an empty launch"
            " queue), so faster kernels only make the device wait longer, and autocast's casts are"
            " additional launches."
        )
    if others:
        on_cpu = any(pair.row.records[0].environment.device_kind == "cpu" for pair in others)
        why = (
            ": this CPU has no faster unit for the dtype, or none at all."
            if on_cpu
            else ", which the host does not limit: what the matmuls gain is lost in casts and in"
            " operators that move as many bytes as before."
        )
        yield f"It does not help {_some((pair.name for pair in others), 8)}{why}"


def _phases_against_step(rows: Sequence[Row]) -> Iterator[Finding]:
    """Compare the sum of the phases with steps that have no marks between them."""
    off = [
        (abs(summarize(sums).median / step - 1.0), f"{row.name}, {mode}", record)
        for row in rows
        for mode, record in row.by_mode.items()
        if (step := median_ms(record, "step")) and (sums := phase_sums(record))
    ]
    if not off:
        return
    worst, name, record = max(off, key=lambda one: one[0])
    middle = sorted(value for value, _, _ in off)[len(off) // 2]
    close = sum(value <= PHASES_OFF for value, _, _ in off)
    steady = all(is_steady(one) for _, _, one in off)
    agreement = "add up to the step that was timed as one"
    if not close:
        agreement = "do not add up to the step that was timed as one"
    elif close < len(off):
        agreement += f" within {percent(PHASES_OFF)} in {close} of {len(off)} cases"
    doubt = "" if is_steady(record) else ", whose samples are not steady"
    yield Finding(
        code="benchmark.phases-sum",
        values={"close": close, "of": len(off), "middle": middle, "worst": worst, "case": name},
        records=_ids(one for _, _, one in off),
        text=f"The phases {agreement}: {percent(middle)} apart in the median of {len(off)},"
        f" {percent(worst)} at most ({name}{doubt}).",
        tone="good" if close == len(off) and steady else "info",
    )


def _failures(rows: Sequence[Row]) -> Iterator[Finding]:
    failed: dict[str, list[tuple[str, Record]]] = {}
    for row in rows:
        for mode, record in row.by_mode.items():
            if record.status != "ok":
                failed.setdefault(record.status, []).append((f"{row.name} {mode}", record))
    for status, cases in failed.items():
        reason = cases[0][1].reason
        yield Finding(
            code="benchmark.failed",
            values={"status": status, "cases": len(cases), "reason": reason},
            records=_ids(record for _, record in cases),
            timed=False,
            text=f"{len(cases)} {'case' if len(cases) == 1 else 'cases'}"
            f" {_FAILED.get(status, 'failed')}: {_some((name for name, _ in cases), unique=False)}."
            f" The first reason: {reason}",
            tone="warn",
        )


def _lints(rows: Sequence[Row]) -> Iterator[Finding]:
    """Lints by code. They are run again, because a record may be older than a lint."""
    records = [record for row in rows for record in row.records]
    grouped = lint_group(records)
    lints_by_code: dict[str, list[tuple[str, Record]]] = {}
    for record in records:
        for lint in (*lint_record(record), *grouped.get(record.id, ())):
            lints_by_code.setdefault(lint.code, []).append((lint.message, record))
    for code, lints in lints_by_code.items():
        yield Finding(
            code="benchmark.lint",
            values={"lint": code, "times": len(lints)},
            records=_ids(record for _, record in lints),
            timed=False,
            text=f"Lint {code}, {len(lints)}×, first: {lints[0][0]}",
            tone="warn",
        )


def _ids(records: Iterable[Record]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(record.id for record in records))


def _some(names: Iterable[str], most: int = 3, *, unique: bool = True) -> str:
    listed = list(dict.fromkeys(names) if unique else names)
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")
