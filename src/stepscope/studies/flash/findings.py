"""Findings of the grid, and of failed cases in all parts of the study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.analysis.checks import check_record
from stepscope.analysis.effects import Effect, quotient
from stepscope.analysis.limits import matmul_ceiling, matrix_ceiling
from stepscope.analysis.scaling import fitted_exponent
from stepscope.analysis.verdict import plain
from stepscope.errors import some
from stepscope.records.schema import Record
from stepscope.report.blocks import Finding, Value
from stepscope.report.format import bytes_, count, counted, duration, number, percent, rate
from stepscope.studies.attention.workload import RESULTS
from stepscope.studies.flash.rows import OURS, GridRow, sort_key
from stepscope.views.builders import failure_findings, finding, grouped

HOST_MARK = "*"
TILED, NAIVE = "tiled", "reference"
POLICY = (
    "at most 1.0× (output, 16 bit), 1.5× (gradients, 16 bit) or 2× (float32) the error of the"
    " reference in the same dtype, plus one unit in the last place"
)


def grid_findings(rows: Sequence[GridRow]) -> Iterator[Finding]:
    timed = [row for row in rows if row.record.status == "ok" and row.time()]
    yield from _highest_rates(timed)
    yield from _against_naive(timed)
    yield from _cpu_bound(timed)
    yield from _saved(timed)
    yield from _memory_growth(timed)
    yield from _accuracy(timed)
    yield from _own_kernels(timed)


def _highest_rates(rows: Sequence[GridRow]) -> Iterator[Finding]:
    """For each dtype, the highest rate of all implementations and of Stepscope's kernels."""
    for dtype, members in grouped(rows, lambda row: row.case.dtype).items():
        best = max(members, key=_rate)
        ours = max((row for row in members if row.attention == OURS), key=_rate, default=best)
        share, ceiling, limit = (
            best.share(),
            matrix_ceiling(best.record),
            matmul_ceiling(best.record),
        )
        cited = [best]
        values: dict[str, Value] = {
            "dtype": dtype,
            "rate": _rate(best),
            "attention": best.attention,
            "shape": best.case.sizes,
            "share": None if share is None else plain(share),
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
            cited.append(ours)
            values |= {"ours": _rate(ours), "ours_shape": ours.case.sizes}
            text += f"; Stepscope reaches {rate(_rate(ours), 'FLOP/s')} at {ours.case.sizes}"
        text += "."
        if limit and ceiling and limit.name != ceiling.name:
            values |= {"limit": limit.name, "limit_rate": limit.value}
            text += (
                f" Its {dtype} matmuls are computed as {limit.name}, whose ceiling is"
                f" {rate(limit.value, 'FLOP/s')}."
            )
        yield finding("flash.highest-rate", text, cited, values)


def _rate(row: GridRow) -> float:
    return row.rate() or 0.0


class BaselinePair(NamedTuple):
    """Stepscope's kernels and the fastest other implementation at one shape."""

    ours: GridRow
    baseline: GridRow

    @property
    def ratio(self) -> float:
        """Time of the baseline over that of Stepscope; above 1 Stepscope is faster."""
        return self.baseline.median / self.ours.median

    @property
    def effect(self) -> Effect:
        """The ratio with its interval."""
        ours, baseline = self.ours.time(), self.baseline.time()
        assert ours is not None
        assert baseline is not None
        return quotient(baseline, ours)

    @property
    def is_cpu_bound(self) -> bool:
        return self.ours.is_cpu_bound or self.baseline.is_cpu_bound


def baseline_pairs(rows: Sequence[GridRow]) -> list[BaselinePair]:
    """Stepscope and the fastest other implementation, by shape, where both were timed."""
    timed = [row for row in rows if row.record.status == "ok" and row.time() is not None]
    pairs = []
    for members in grouped(timed, lambda row: row.label).values():
        ours = next((row for row in members if row.attention == OURS), None)
        others = [row for row in members if row.attention != OURS]
        if ours and others:
            pairs.append(BaselinePair(ours, min(others, key=lambda row: row.median)))
    return sorted(pairs, key=lambda pair: sort_key(pair.ours.case))


def _against_naive(rows: Sequence[GridRow]) -> Iterator[Finding]:
    """Our implementation over naive attention, at the shortest and the longest common length."""
    ours = next((name for name in (OURS, TILED) if any(r.attention == name for r in rows)), None)
    for dtype, members in grouped(rows, lambda row: row.case.dtype).items():
        by_shape = grouped(members, lambda row: row.label)
        pairs = [
            BaselinePair(named[ours], named[NAIVE])
            for those in by_shape.values()
            if {ours, NAIVE} <= (named := {row.attention: row for row in those}).keys()
            and ours is not None
        ]
        if not pairs:
            continue
        pairs.sort(key=lambda pair: (pair.ours.case.seq, pair.ours.case.head))
        ends = [pairs[0], pairs[-1]] if len(pairs) > 1 else pairs
        listed = " and ".join(
            f"{number(pair.ratio, 3)} times as fast at {pair.ours.case.sizes}"
            f" ({duration(pair.ours.median)} and {duration(pair.baseline.median)})"
            for pair in ends
        )
        faster = sum(pair.effect.above for pair in pairs)
        slower = sum(pair.effect.below for pair in pairs)
        longest = max(row.case.seq for row in members if row.attention == ours)
        beyond = longest > max(pair.ours.case.seq for pair in pairs)
        yield finding(
            "flash.against-naive",
            f"Compared with naive attention in {dtype}, forward and backward, {ours} is {listed};"
            f" faster at {faster} and slower at {slower} of {counted(len(pairs), 'shape')}."
            + (f" Naive attention has no time at length {count(longest)}." if beyond else ""),
            [row for pair in pairs for row in pair],
            {
                "dtype": dtype,
                "attention": ours,
                "shortest": ends[0].ratio,
                "longest": ends[-1].ratio,
                "faster": faster,
                "slower": slower,
                "shapes": len(pairs),
            },
        )


def _cpu_bound(rows: Sequence[GridRow]) -> Iterator[Finding]:
    """Cells whose time is that of issuing the launches, not that of the kernels."""
    slow = [row for row in rows if row.is_cpu_bound]
    if not slow:
        return
    single = [row.case.seq for row in rows if row.case.is_single and not row.is_cpu_bound]
    ours = [row.issued_ms() or 0.0 for row in slow if row.attention == OURS]
    text = (
        f"{len(slow)} of {len(rows)} cells are CPU-bound (issuing the launches takes more than half"
        f" of the time); their rates are not those of the kernels ({HOST_MARK} in the tables)."
    )
    if single:
        text += f" With one head, every cell below length {min(single)} is CPU-bound."
    if ours:
        text += (
            f" In these cells issuing a forward and backward pass of {OURS} takes"
            f" {duration(min(ours))} to {duration(max(ours))}."
        )
    yield finding(
        "flash.host-bound",
        text,
        rows,
        {
            "cells": len(slow),
            "of": len(rows),
            "free_from_length": min(single, default=None),
            "issue_ms_low": min(ours, default=None),
            "issue_ms_high": max(ours, default=None),
        },
        tone="warn",
    )


def _saved(rows: Sequence[GridRow]) -> Iterator[Finding]:
    """Bytes that a forward pass saves for backward, measured and predicted."""
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
    yield finding(
        "flash.saved",
        f"{text}.",
        [row for _, row in pairs],
        {"equal": equal, "cells": len(pairs), "off_bytes": most, "cell": name},
        tone="info" if inexact else "good",
        timed=False,
    )


def _memory_growth(rows: Sequence[GridRow]) -> Iterator[Finding]:
    """Growth of peak memory with the length, at one d and dtype."""
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
    growth = [
        f"{name} {number(exponents[name], 2)} ({bytes_(last.peak or 0.0)} at {last.case.seq})"
        for name, (*_, last) in longest.items()
    ]
    if growth:
        yield finding(
            "flash.memory-growth",
            "Peak memory grows as a power of the length; exponents over the three longest in"
            f" {dtype} at d {head}: {', '.join(growth)}.",
            [row for points in longest.values() for row in points],
            {"dtype": dtype, "head": head, **exponents},
        )


def _accuracy(rows: Sequence[GridRow]) -> Iterator[Finding]:
    known = [row for row in rows if row.error_ratio(*RESULTS) is not None]
    for attention, members in grouped(known, lambda row: row.attention).items():
        missed = [row for row in members if row.misses]
        # The policy binds Stepscope's implementations: of the others, only misses are reported.
        if attention not in (OURS, TILED) and not missed:
            continue
        worst = max(members, key=lambda row: row.error_ratio(*RESULTS) or 0.0)
        ratio = worst.error_ratio(*RESULTS) or 0.0
        text = (
            f"The error of {attention} is at most {number(ratio, 3)} times that of the reference in"
            f" the same dtype, over {counted(len(members), 'shape')} ({worst.label})."
        )
        if missed:
            named = [f"{row.label} {'/'.join(row.misses)}" for row in missed]
            text += f" It exceeds the policy of Stepscope at {len(missed)}: {some(named)}."
        else:
            text += f" All are within the policy: {POLICY}."
        yield finding(
            "flash.accuracy",
            text,
            members,
            {
                "attention": attention,
                "ratio": ratio,
                "shapes": len(members),
                "worst": worst.label,
                "missed": len(missed),
                "tensors": "/".join(missed[0].misses) if missed else "",
            },
            tone="info" if attention != OURS else "warn" if missed else "good",
            timed=False,
        )


def _own_kernels(rows: Sequence[GridRow]) -> Iterator[Finding]:
    ours = [row for row in rows if row.attention == OURS and row.kernels.get("forward")]
    foreign = any(
        check.code == "other-kernel" for row in ours for check in check_record(row.record)
    )
    if ours and not foreign:
        yield finding(
            "flash.own-kernels",
            f"In all {len(ours)} records of {OURS} the profiler saw Stepscope's kernels for forward"
            " and backward, and no other attention kernel.",
            ours,
            {"records": len(ours)},
            tone="good",
            timed=False,
        )


def common_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Failed cases of all parts."""
    yield from failure_findings("flash.without-result", [(r.case, r) for r in records])
