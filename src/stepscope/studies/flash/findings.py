"""What the grid says, in sentences that carry their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from stepscope.analysis.limits import matrix_ceiling, products_ceiling
from stepscope.analysis.lints import lint_record
from stepscope.analysis.scaling import fitted_exponent
from stepscope.records.schema import Record
from stepscope.report.blocks import Finding, Tone
from stepscope.report.format import bytes_, duration, number, percent, rate
from stepscope.studies.attention_workload import RESULTS
from stepscope.studies.flash.accuracy_view import POLICY
from stepscope.studies.flash.kernels_view import kernels_of
from stepscope.studies.flash.overview import HOST_MARK, rivals
from stepscope.studies.flash.rows import OURS, GridRow

_SEVERAL = 3
_OF_THE_HOST = ("wide-spread", "first-call-inside")
"""Complaints about times that scatter, as those of a busy host do."""
_WHAT = {"oom": "ran out of memory", "skipped": "were skipped", "timeout": "timed out"}


def grid_findings(rows: Sequence[GridRow]) -> Iterator[Finding]:
    timed = [row for row in rows if row.record.status == "ok" and row.time()]
    yield from _nearest_to_the_limit(timed)
    yield from _fastest_peer(timed)
    yield from _host(timed)
    yield from _formats(timed)
    yield from _memory(timed)
    yield from _accuracy(timed)
    yield from _proof(timed)


def _nearest_to_the_limit(rows: Sequence[GridRow]) -> Iterator[Finding]:
    """By format: the best of ours and the best of all."""
    for dtype in dict.fromkeys(row.work.dtype for row in rows):
        judged = [(row.rate() or 0.0, row) for row in rows if row.work.dtype == dtype]
        best, row = max(judged, key=lambda pair: pair[0])
        ceiling = matrix_ceiling(row.record)
        share = row.share()
        limit = (
            f", {percent(share)} of the {rate(ceiling.value, 'FLOP/s')} that matrix products alone"
            " reach here"
            if share and ceiling
            else ""
        )
        text = (
            f"The highest rate in {dtype} is {rate(best, 'FLOP/s')} forward and backward,"
            f" {row.attention} at {row.shape.sizes}{limit}"
        )
        ours = [pair for pair in judged if pair[1].attention == OURS]
        if ours and row.attention != OURS:
            own, at = max(ours, key=lambda pair: pair[0])
            text += f"; ours reaches {rate(own, 'FLOP/s')} at {at.shape.sizes}"
        yield Finding(text=text + "." + _other_limit(row))


def _other_limit(row: GridRow) -> str:
    own, ceiling = products_ceiling(row.record), matrix_ceiling(row.record)
    if own is None or ceiling is None or own.name == ceiling.name:
        return ""
    return (
        f" Each of its {row.work.dtype} products is made as {own.name}, whose limit is"
        f" {rate(own.value, 'FLOP/s')}."
    )


def _fastest_peer(rows: Sequence[GridRow]) -> Iterator[Finding]:
    found = rivals(rows)
    by_kernels = [rival for rival in found if not rival.host_decides]
    if not found:
        return
    lost = sorted((r for r in by_kernels if r.ratio < 1.0), key=lambda r: r.ratio)
    behind = [
        f"{number(r.ratio, 3)} of {r.peer.attention} at {r.ours.shape.sizes} {r.ours.work.dtype}"
        for r in lost
    ]
    by_host = [rival for rival in found if rival.host_decides]
    slower = sum(rival.ratio < 1.0 for rival in by_host)
    text = (
        f"Against the fastest other at each of {len(found)} shapes, one after the other and not in"
        f" turns: where kernels decide, ours is faster at {len(by_kernels) - len(lost)} of"
        f" {len(by_kernels)}"
    )
    text += f" and behind at {len(lost)} ({_some(behind)})." if lost else "."
    if by_host:
        text += f" At the other {len(by_host)} the host decides, and ours is behind at {slower}."
    yield Finding(text=text)


def _host(rows: Sequence[GridRow]) -> Iterator[Finding]:
    """A rate that the host made says nothing about a kernel."""
    slow = [row for row in rows if row.host_decides]
    if not slow:
        return
    single = [row.work.seq for row in rows if row.is_single and not row.host_decides]
    ours = [row.issued_ms() or 0.0 for row in slow if row.attention == OURS]
    text = (
        f"In {len(slow)} of {len(rows)} cells the host issued for more than half of the time; their"
        f" rates are not the kernels' ({HOST_MARK} in the tables)."
    )
    if single:
        text += f" With one head no cell below length {min(single)} is free of it."
    if ours:
        text += (
            f" To issue a forward and a backward of {OURS} it took {duration(min(ours))} to"
            f" {duration(max(ours))} there."
        )
    yield Finding(text=text, tone="warn")


def _formats(rows: Sequence[GridRow]) -> Iterator[Finding]:
    """A 16-bit format that is slower than float32 is a kernel that misses the tensor cores."""
    ours = {(row.shape.sizes, row.work.dtype): row for row in rows if row.attention == OURS}
    slower, compared = [], 0
    for (sizes, dtype), row in ours.items():
        wide = ours.get((sizes, "float32"))
        if dtype == "float32" or wide is None:
            continue
        compared += 1
        narrow_time, wide_time = row.time(), wide.time()
        assert narrow_time is not None
        assert wide_time is not None
        if narrow_time.low > wide_time.high:
            slower.append(f"{dtype} {sizes}")
    if compared:
        said = f"slower at {_some(slower)}" if slower else "slower nowhere"
        yield Finding(
            text=f"Our kernels in a 16-bit format against float32, {compared} shapes: {said}.",
            tone="warn" if slower else "good",
        )


def _memory(rows: Sequence[GridRow]) -> Iterator[Finding]:
    """How the peak grows with the length, by implementation, at one d and format."""
    held: dict[str, dict[float, float]] = {}
    single = [row for row in rows if row.is_single and row.record.quantity("peak_bytes")]
    if not single:
        return
    like = (single[0].work.dtype, max(row.work.head for row in single))
    for row in single:
        if (row.work.dtype, row.work.head) == like:
            peak = row.record.quantity("peak_bytes") or 0.0
            held.setdefault(row.attention, {})[float(row.work.seq)] = peak
    grown = [
        f"{name} {number(fitted_exponent(list(points)[-3:], list(points.values())[-3:]), 2)}"
        f" ({bytes_(points[max(points)])} at {max(points):.0f})"
        for name, points in held.items()
        if len(points) >= 3
    ]
    yield from _saved(rows)
    if grown:
        yield Finding(
            text=f"Peak memory grows as a power of the length, over the longest three in {like[0]}"
            f" at d {like[1]}: {', '.join(grown)}."
        )


def _saved(rows: Sequence[GridRow]) -> Iterator[Finding]:
    """What a forward leaves for its backward, against what the shapes predict."""
    pairs = [
        (row, held - (row.record.quantity("predicted_saved_bytes") or 0.0))
        for row in rows
        if (held := row.record.quantity("saved_bytes")) is not None
    ]
    if not pairs:
        return
    off = {row.attention: extra for row, extra in pairs if extra}
    equal = sum(extra == 0.0 for _, extra in pairs)
    text = (
        f"What a forward saves is what the shapes predict, to the byte, in {equal} of"
        f" {len(pairs)} cells"
    )
    if off:
        farthest = max((abs(extra), row.name) for row, extra in pairs)
        text += f"; off are {', '.join(off)}, at most by {bytes_(farthest[0])} ({farthest[1]})"
    yield Finding(text=f"{text}.", tone="info" if off else "good")


def _accuracy(rows: Sequence[GridRow]) -> Iterator[Finding]:
    judged = [row for row in rows if row.error_ratio(*RESULTS) is not None]
    for attention in dict.fromkeys(row.attention for row in judged):
        own = [row for row in judged if row.attention == attention]
        missed = [row for row in own if row.misses]
        if attention != OURS and not missed:
            continue
        worst = max(own, key=lambda row: row.error_ratio(*RESULTS) or 0.0)
        text = (
            f"{attention} errs by at most {number(worst.error_ratio(*RESULTS) or 0.0, 3)} times"
            f" what the reference in the same format does, over {len(own)} shapes"
            f" ({worst.shape.sizes} {worst.work.dtype})."
        )
        if missed:
            named = [f"{row.shape.sizes} {row.work.dtype} {'/'.join(row.misses)}" for row in missed]
            text += f" Beyond the policy of our own kernels at {len(missed)}: {_some(named)}."
        else:
            text += f" All are within the policy: {POLICY}."
        # Others are held to no promise of ours; it is only said.
        tones: dict[bool, Tone] = {True: "warn", False: "good"}
        yield Finding(text=text, tone=tones[bool(missed)] if attention == OURS else "info")


def _proof(rows: Sequence[GridRow]) -> Iterator[Finding]:
    seen = [row for row in rows if kernels_of(row.record).get("forward")]
    ours = [row for row in seen if row.attention == OURS]
    foreign = [row for row in seen if _ran_another(row.record)]
    if ours and not any(row in foreign for row in ours):
        yield Finding(
            text=f"In all {len(ours)} records of {OURS} the profiler saw our kernels, forward and"
            " backward, and no other attention kernel.",
            tone="good",
        )


def _ran_another(record: Record) -> bool:
    return any(lint.code == "other-kernel" for lint in lint_record(record))


def common_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Of all parts: what did not run, and what is not to be believed."""
    failed = [record for record in records if record.status != "ok"]
    for status in dict.fromkeys(record.status for record in failed):
        alike = [record for record in failed if record.status == status]
        names = [record.case for record in alike]
        yield Finding(
            text=f"{len(names)} of {len(records)} cases {_WHAT.get(status, 'failed')}:"
            f" {_some(names)}. The first said: {alike[0].reason}",
            tone="info" if status == "skipped" else "warn",
        )
    lints = [(lint, record) for record in records for lint in lint_record(record)]
    for code, times in Counter(lint.code for lint, _ in lints).items():
        told = [(lint.message, record) for lint, record in lints if lint.code == code]
        text = f"Lint {code}, {times}×, first: {told[0][0]}"
        by_host = sum(_host_decides(record) for _, record in told)
        if code in _OF_THE_HOST and by_host:
            text += f". Of these, {by_host} are cells in which the host decides"
        yield Finding(text=f"{text}.", tone="warn", timed=False)


def _host_decides(record: Record) -> bool:
    return record.config["kind"] == "grid" and GridRow(record).host_decides


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SEVERAL
    return ", ".join(names[:_SEVERAL]) + (f" and {more} more" if more > 0 else "")
