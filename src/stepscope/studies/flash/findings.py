"""Findings of the grid, and of failed cases and lints in all parts of the study."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stepscope.analysis.limits import matmul_ceiling, matrix_ceiling
from stepscope.analysis.lints import lint_record
from stepscope.analysis.scaling import fitted_exponent
from stepscope.records.schema import Record
from stepscope.report.blocks import Finding, Value
from stepscope.report.format import bytes_, duration, number, percent, rate
from stepscope.studies.attention.workload import RESULTS
from stepscope.studies.flash.rows import OURS, GridRow, sort_key

HOST_MARK = "*"
POLICY = (
    "at most 1.0× (output, 16 bit), 1.5× (gradients, 16 bit) or 2× (float32) the error of the"
    " reference in the same dtype, plus one unit in the last place"
)
_SEVERAL = 3
_OF_THE_HOST = ("wide-spread", "first-call-inside")
"""Lints about spread, which host-bound times are expected to have."""
_WHAT = {"oom": "ran out of memory", "skipped": "were skipped", "timeout": "timed out"}


def grid_findings(rows: Sequence[GridRow]) -> Iterator[Finding]:
    timed = [row for row in rows if row.record.status == "ok" and row.time()]
    yield from _highest_rates(timed)
    yield from _fastest_peer(timed)
    yield from _host(timed)
    yield from _narrow_dtypes(timed)
    yield from _saved(timed)
    yield from _memory_growth(timed)
    yield from _accuracy(timed)
    yield from _own_kernels(timed)


def _ids(rows: Iterable[GridRow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.record.id for row in rows))


def _highest_rates(rows: Sequence[GridRow]) -> Iterator[Finding]:
    """Report, for each dtype, the highest rate of all implementations and of ours."""
    for dtype in dict.fromkeys(row.case.dtype for row in rows):
        alike = [row for row in rows if row.case.dtype == dtype]
        best = max(alike, key=_rate)
        ours = max((row for row in alike if row.attention == OURS), key=_rate, default=best)
        share, ceiling, own = best.share(), matrix_ceiling(best.record), _rate(ours)
        values: dict[str, Value] = {
            "dtype": dtype,
            "rate": _rate(best),
            "attention": best.attention,
            "shape": best.case.sizes,
            "share": share,
        }
        text = (
            f"The highest rate in {dtype} is {rate(_rate(best), 'FLOP/s')} forward and backward,"
            f" {best.attention} at {best.case.sizes}"
        )
        if share and ceiling:
            text += (
                f", {percent(share)} of the {rate(ceiling.value, 'FLOP/s')} that matmuls"
                " alone reach here"
            )
        if ours is not best and best.attention != OURS:
            values |= {"ours": own, "ours_shape": ours.case.sizes}
            text += f"; ours reaches {rate(own, 'FLOP/s')} at {ours.case.sizes}"
        text += "."
        limit = matmul_ceiling(best.record)
        if limit and ceiling and limit.name != ceiling.name:
            values |= {"limit": limit.name, "limit_rate": limit.value}
            text += (
                f" Its {dtype} matmuls are computed as {limit.name}, whose limit is"
                f" {rate(limit.value, 'FLOP/s')}."
            )
        cited = (best, ours) if "ours" in values else (best,)
        yield Finding(code="flash.highest-rate", values=values, records=_ids(cited), text=text)


def _rate(row: GridRow) -> float:
    return row.rate() or 0.0


class Rival(NamedTuple):
    """Our implementation and the fastest other at one shape."""

    ours: GridRow
    peer: GridRow

    @property
    def ratio(self) -> float:
        """The peer's time over ours; above 1 ours is faster."""
        return self.peer.median / self.ours.median

    @property
    def host_decides(self) -> bool:
        return self.ours.host_decides or self.peer.host_decides


def rivals(rows: Sequence[GridRow]) -> list[Rival]:
    """Ours against the fastest other, by shape, where both were timed."""
    by_shape: dict[str, list[GridRow]] = {}
    for row in rows:
        if row.record.status == "ok" and row.time() is not None:
            by_shape.setdefault(row.label, []).append(row)
    pairs = []
    for members in by_shape.values():
        ours = next((row for row in members if row.attention == OURS), None)
        others = [row for row in members if row.attention != OURS]
        if ours and others:
            pairs.append(Rival(ours, min(others, key=lambda row: row.median)))
    return sorted(pairs, key=lambda rival: sort_key(rival.ours.case))


def _fastest_peer(rows: Sequence[GridRow]) -> Iterator[Finding]:
    pairs = rivals(rows)
    if not pairs:
        return
    by_kernels = [rival for rival in pairs if not rival.host_decides]
    by_host = [rival for rival in pairs if rival.host_decides]
    lost = sorted((r for r in by_kernels if r.ratio < 1.0), key=lambda r: r.ratio)
    behind = [f"{number(r.ratio, 3)} of {r.peer.attention} at {r.ours.label}" for r in lost]
    slower = sum(rival.ratio < 1.0 for rival in by_host)
    faster = len(by_kernels) - len(lost)
    yield Finding(
        code="flash.fastest-peer",
        values={
            "shapes": len(pairs),
            "by_kernels": len(by_kernels),
            "faster": faster,
            "behind": len(lost),
            "lowest": lost[0].ratio if lost else None,
            "by_host": len(by_host),
            "behind_by_host": slower,
        },
        records=_ids(row for rival in pairs for row in rival),
        text=f"Compared with the fastest other implementation at each of {len(pairs)} shapes (timed"
        f" one after the other, not interleaved), ours is faster at {faster} of {len(by_kernels)}"
        " device-bound shapes"
        + (f" and slower at {len(lost)} ({_some(behind)})." if lost else "."),
        conclusion=f"The other {len(by_host)} shapes are host-bound; ours is slower at {slower}."
        if by_host
        else "",
    )


def _host(rows: Sequence[GridRow]) -> Iterator[Finding]:
    """Report host-bound cells, whose rate is not that of the kernels."""
    slow = [row for row in rows if row.host_decides]
    if not slow:
        return
    single = [row.case.seq for row in rows if row.case.is_single and not row.host_decides]
    ours = [row.issued_ms() or 0.0 for row in slow if row.attention == OURS]
    text = (
        f"{len(slow)} of {len(rows)} cells are host-bound (host issue time above half of the time);"
        f" their rates are not those of the kernels ({HOST_MARK} in the tables)."
    )
    if single:
        text += f" With one head, every cell below length {min(single)} is host-bound."
    if ours:
        text += (
            f" In these cells issuing a forward and a backward of {OURS} takes"
            f" {duration(min(ours))} to {duration(max(ours))}."
        )
    yield Finding(
        code="flash.host-bound",
        values={
            "cells": len(slow),
            "of": len(rows),
            "free_from_length": min(single, default=None),
            "issue_ms_low": min(ours, default=None),
            "issue_ms_high": max(ours, default=None),
        },
        records=_ids(rows),
        text=text,
        tone="warn",
    )


def _narrow_dtypes(rows: Sequence[GridRow]) -> Iterator[Finding]:
    """Report 16-bit kernels slower than float32, a sign that they miss the tensor cores."""
    ours = {(row.case.sizes, row.case.dtype): row for row in rows if row.attention == OURS}
    pairs = [
        (row, wide)
        for (sizes, dtype), row in ours.items()
        if dtype != "float32" and (wide := ours.get((sizes, "float32")))
    ]
    slower = [
        f"{row.case.dtype} {row.case.sizes}"
        for row, wide in pairs
        if (here := row.time()) and (there := wide.time()) and here.low > there.high
    ]
    if pairs:
        yield Finding(
            code="flash.narrow-dtype",
            values={"shapes": len(pairs), "slower": len(slower)},
            records=_ids(row for pair in pairs for row in pair),
            text=f"Our kernels in a 16-bit dtype against float32, {len(pairs)} shapes:"
            f" slower {f'at {_some(slower)}' if slower else 'nowhere'}.",
            tone="warn" if slower else "good",
        )


def _saved(rows: Sequence[GridRow]) -> Iterator[Finding]:
    """Compare the bytes that a forward saves for backward with the prediction."""
    pairs = [
        (saved - (row.predicted_saved or 0.0), row)
        for row in rows
        if (saved := row.record.quantity("saved_bytes")) is not None
    ]
    if not pairs:
        return
    inexact = dict.fromkeys(row.attention for extra, row in pairs if extra)
    equal = sum(extra == 0.0 for extra, _ in pairs)
    most, name = max((abs(extra), f"{row.attention} {row.label}") for extra, row in pairs)
    text = (
        f"The bytes saved for backward match the prediction from the shapes exactly in {equal} of"
        f" {len(pairs)} cells"
    )
    if inexact:
        text += f"; cells of {', '.join(inexact)} differ by at most {bytes_(most)} ({name})"
    yield Finding(
        code="flash.saved",
        values={"equal": equal, "cells": len(pairs), "off_bytes": most, "cell": name},
        records=_ids(row for _, row in pairs),
        text=f"{text}.",
        tone="info" if inexact else "good",
    )


def _memory_growth(rows: Sequence[GridRow]) -> Iterator[Finding]:
    """Report how peak memory grows with the length, at one d and dtype."""
    single = [row for row in rows if row.case.is_single and row.peak]
    if not single:
        return
    dtype, head = single[0].case.dtype, max(row.case.head for row in single)
    by_length: dict[str, dict[int, GridRow]] = {}
    for row in single:
        if (row.case.dtype, row.case.head) == (dtype, head):
            by_length.setdefault(row.attention, {})[row.case.seq] = row
    longest = {name: list(points.values())[-3:] for name, points in by_length.items()}
    longest = {name: points for name, points in longest.items() if len(points) == 3}
    exponents = {
        name: fitted_exponent([row.case.seq for row in points], [row.peak or 0.0 for row in points])
        for name, points in longest.items()
    }
    grown = [
        f"{name} {number(exponents[name], 2)} ({bytes_(last.peak or 0.0)} at {last.case.seq})"
        for name, (*_, last) in longest.items()
    ]
    if grown:
        yield Finding(
            code="flash.memory-growth",
            values={"dtype": dtype, "head": head, **exponents},
            records=_ids(row for points in longest.values() for row in points),
            text="Peak memory grows as a power of the length; exponents over the three longest in"
            f" {dtype} at d {head}: {', '.join(grown)}.",
        )


def _accuracy(rows: Sequence[GridRow]) -> Iterator[Finding]:
    judged: dict[str, list[tuple[float, GridRow]]] = {}
    for row in rows:
        ratio = row.error_ratio(*RESULTS)
        if ratio is not None:
            judged.setdefault(row.attention, []).append((ratio, row))
    for attention, own in judged.items():
        missed = [row for _, row in own if row.misses]
        # The policy binds our kernels only: of the others, only misses are reported.
        if attention != OURS and not missed:
            continue
        ratio, worst = max(own, key=lambda pair: pair[0])
        text = (
            f"The error of {attention} is at most {number(ratio, 3)} times that of the reference in"
            f" the same dtype, over {len(own)} shapes ({worst.label})."
        )
        if missed:
            named = [f"{row.label} {'/'.join(row.misses)}" for row in missed]
            text += f" It exceeds the policy of our kernels at {len(missed)}: {_some(named)}."
        else:
            text += f" All are within the policy: {POLICY}."
        yield Finding(
            code="flash.accuracy",
            values={
                "attention": attention,
                "ratio": ratio,
                "shapes": len(own),
                "worst": worst.label,
                "missed": len(missed),
                "tensors": "/".join(missed[0].misses) if missed else "",
            },
            records=_ids(row for _, row in own),
            text=text,
            tone="info" if attention != OURS else "warn" if missed else "good",
        )


def _own_kernels(rows: Sequence[GridRow]) -> Iterator[Finding]:
    ours = [row for row in rows if row.attention == OURS and row.kernels.get("forward")]
    foreign = any(lint.code == "other-kernel" for row in ours for lint in lint_record(row.record))
    if ours and not foreign:
        yield Finding(
            code="flash.own-kernels",
            values={"records": len(ours)},
            records=_ids(ours),
            text=f"In all {len(ours)} records of {OURS} the profiler saw our forward and backward"
            " kernels and no other attention kernel.",
            tone="good",
        )


def common_findings(records: Sequence[Record], rows: Sequence[GridRow]) -> Iterator[Finding]:
    """Findings about failed cases and lints of all parts."""
    failed = [record for record in records if record.status != "ok"]
    for status in dict.fromkeys(record.status for record in failed):
        alike = [record for record in failed if record.status == status]
        yield Finding(
            code="flash.without-result",
            values={"status": status, "cases": len(alike), "of": len(records)},
            records=tuple(record.id for record in alike),
            text=f"{len(alike)} of {len(records)} cases {_WHAT.get(status, 'failed')}:"
            f" {_some([record.case for record in alike])}. First reason: {alike[0].reason}",
            tone="info" if status == "skipped" else "warn",
        )
    host_bound = {row.record.id for row in rows if row.host_decides}
    lints = [(lint, record.id) for record in records for lint in lint_record(record)]
    for code, times in Counter(lint.code for lint, _ in lints).items():
        matches = [(lint.message, record) for lint, record in lints if lint.code == code]
        by_host = sum(record in host_bound for _, record in matches) * (code in _OF_THE_HOST)
        text = f"Lint {code}, {times}×, first: {matches[0][0]}"
        if by_host:
            text += f". Of these, {by_host} are host-bound cells"
        yield Finding(
            code="flash.lint",
            values={"lint": code, "times": times, "host_decides": by_host},
            records=tuple(dict.fromkeys(record for _, record in matches)),
            text=f"{text}.",
            tone="warn",
            timed=False,
        )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SEVERAL
    return ", ".join(names[:_SEVERAL]) + (f" and {more} more" if more > 0 else "")
