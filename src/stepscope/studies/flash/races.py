"""Stepscope's attention compared with other implementations: ratios, findings and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from stepscope.analysis.effects import Effect, interval_of
from stepscope.records.schema import Record
from stepscope.records.stats import Ratio
from stepscope.report.blocks import Cell, Finding, Interval, Table
from stepscope.report.format import counted, duration, number
from stepscope.report.tables import col, table
from stepscope.studies.flash.cases import PUBLISHED_SHAPES
from stepscope.studies.flash.rows import OURS, AttentionRace, sort_key
from stepscope.views.builders import finding, rated, ratio_cell

PUBLISHED = tuple(shape.replace("x", ",") for shape in PUBLISHED_SHAPES)
LEADERBOARD = PUBLISHED[0]
"""The shape timed by the course's leaderboard."""
SHORT_BASELINE = "sdpa"


class Comparison(NamedTuple):
    """A baseline and the shapes at which Stepscope is compared with it."""

    baseline: str
    shapes: tuple[str, ...]
    dtype: str = "bfloat16"


COMPARISONS = (
    Comparison("sdpa_flash", PUBLISHED),
    Comparison("flex", PUBLISHED),
    Comparison("sdpa_cudnn", PUBLISHED),
    Comparison("sdpa_efficient", ("1,16,4096,64",), "float32"),
)


class Compared(NamedTuple):
    """A race at one shape and the baseline's time over Stepscope's."""

    race: AttentionRace
    ratio: Ratio

    @property
    def record(self) -> Record:
        return self.race.record


def compared(wanted: Comparison, ran: Sequence[AttentionRace]) -> list[Compared]:
    by_shape = {(race.case.sizes, race.case.dtype): race for race in ran}
    return [
        Compared(race, ratio)
        for sizes in wanted.shapes
        if (race := by_shape.get((sizes, wanted.dtype))) is not None
        and (ratio := race.ratio(wanted.baseline)) is not None
    ]


def short_races(ran: Sequence[AttentionRace], ours: str) -> list[Compared]:
    """Ratios of consecutive calls with one head and a short length, which include CPU time."""
    return [
        Compared(race, ratio)
        for race in ran
        if race.case.is_short
        and race.times(OURS)
        and (ratio := race.ratio(SHORT_BASELINE, ours, in_a_row=True)) is not None
    ]


def lowest(pairs: Sequence[Compared]) -> Compared:
    return min(pairs, key=lambda pair: pair.ratio.value)


def geometric_mean(pairs: Sequence[Compared]) -> Interval:
    """Geometric mean of ratios; averaging the interval ends too makes the interval conservative."""

    def mean(name: str) -> float:
        logs = (math.log(getattr(pair.ratio, name)) for pair in pairs)
        return math.exp(math.fsum(logs) / len(pairs))

    return Interval(value=mean("value"), low=mean("low"), high=mean("high"))


def race_findings(ran: Sequence[AttentionRace]) -> Iterator[Finding]:
    for wanted in COMPARISONS:
        if pairs := compared(wanted, ran):
            yield _against_baseline(wanted, pairs)
    leaderboard = [
        (race, times)
        for race in ran
        if (race.case.sizes, race.case.dtype) == (LEADERBOARD, "bfloat16")
        and (times := race.times(OURS))
    ]
    for race, times in leaderboard[-1:]:
        yield finding(
            "flash.leaderboard-shape",
            f"{LEADERBOARD} takes {duration(times.median)} forward and backward.",
            race,
            {"ms": times.median, "low": times.low, "high": times.high},
        )
    for race in ran:
        for name in race.case.racers:
            reason = race.out(name) or ""
            if reason.startswith("failed"):
                yield finding(
                    "flash.racer-failed",
                    f"{name} at {race.case.sizes} {race.case.dtype} {reason}",
                    race,
                    {"racer": name, "shape": race.case.sizes, "dtype": race.case.dtype},
                    tone="warn",
                )


def _against_baseline(wanted: Comparison, pairs: Sequence[Compared]) -> Finding:
    least, mean = lowest(pairs), geometric_mean(pairs)
    shapes = counted(len(wanted.shapes), "shape")
    missing = len(wanted.shapes) - len(pairs)
    return finding(
        "flash.against-baseline",
        f"Compared with {wanted.baseline} in {wanted.dtype}, Stepscope is {number(mean.value, 3)}"
        f" times as fast (geometric mean of {f'{len(pairs)} of {shapes}' if missing else shapes};"
        f" lowest {number(least.ratio.value, 3)} at {least.race.case.sizes}).",
        pairs,
        {
            "baseline": wanted.baseline,
            "dtype": wanted.dtype,
            "mean": mean.value,
            "low": mean.low,
            "high": mean.high,
            "lowest": least.ratio.value,
            "shape": least.race.case.sizes,
            "missing": missing,
        },
        tone="info" if missing else rated(_effect(mean, pairs), higher_is_better=True),
    )


def _effect(mean: Interval, pairs: Sequence[Compared]) -> Effect:
    """A mean ratio with its interval."""
    times = [pair.race.times(OURS) for pair in pairs]
    samples = min(one.count if one else 0 for one in times)
    return interval_of(Ratio(value=mean.value, low=mean.low, high=mean.high, level=0.95), samples)


class _Speed(NamedTuple):
    """A ratio to a baseline and the medians it is computed from."""

    against: str
    shape: str
    ratio: Interval
    in_a_row: float | None = None
    ours: float | None = None
    baseline: float | None = None


def speed_table(ran: Sequence[AttentionRace], name: str = "flash-speed") -> Table | None:
    shape = "batch, heads, length, d; bfloat16 unless marked fp32"
    single = "median time of the baseline over that of Stepscope, with its 95 % interval"
    in_a_row = "the same ratio of consecutive calls, by the host clock"
    columns = [
        col("compared with", lambda r: r.against),
        col("shape", lambda r: r.shape, hint=shape),
        col("speedup", lambda r: r.ratio, unit="×", hint=single),
        col("consecutive", lambda r: r.in_a_row, unit="×", hint=in_a_row),
        col("Stepscope", lambda r: r.ours, unit="ms"),
        col("baseline", lambda r: r.baseline, unit="ms"),
    ]
    rows = [*_baseline_rows(ran), *_short_rows(ran)]
    if not rows:
        return None
    return table(
        name,
        "Stepscope's attention compared with others, forward + backward, causal",
        rows,
        # A terminal is narrow: show the ratios without their times.
        columns[:-2] if name == "headline" else columns,
        caption=f"Stepscope is {OURS}, called through the public function. Samples are interleaved"
        f" on the same tensors in one process, timed by the GPU clock {_start(ran)}. Means are"
        " geometric. Short: the lowest ratio of the shapes with one head, consecutive calls by the"
        " host clock; auto: the same with auto instead of triton.",
    )


def _baseline_rows(ran: Sequence[AttentionRace]) -> Iterator[_Speed]:
    for wanted in COMPARISONS:
        pairs, baseline = compared(wanted, ran), wanted.baseline
        suffix = "" if wanted.dtype == "bfloat16" else " fp32"
        for race, ratio in pairs:
            in_a_row = race.ratio(baseline, in_a_row=True)
            yield _Speed(
                baseline,
                race.case.sizes + suffix,
                ratio_cell(ratio),
                in_a_row.value if in_a_row else None,
                race.median(OURS),
                race.median(baseline),
            )
        if len(wanted.shapes) > 1 and pairs:
            yield _Speed(baseline, f"mean of {len(pairs)}{suffix}", geometric_mean(pairs))


def _short_rows(ran: Sequence[AttentionRace]) -> Iterator[_Speed]:
    for ours in (OURS, "auto"):
        if pairs := short_races(ran, ours):
            race, ratio = lowest(pairs)
            yield _Speed(
                f"{SHORT_BASELINE}, {'short' if ours == OURS else ours}",
                race.case.sizes,
                ratio_cell(ratio),
                ratio.value,
                race.median(ours, in_a_row=True),
                race.median(SHORT_BASELINE, in_a_row=True),
            )


def _start(ran: Sequence[AttentionRace]) -> str:
    if all(race.case.host_ahead for race in ran):
        return "with the CPU ahead, as in a training step whose launch queue is full"
    return "from an idle GPU, so that times of short kernels include CPU time"


class _Calls(NamedTuple):
    """A race timed by single calls or by consecutive calls."""

    race: AttentionRace
    in_a_row: bool

    @property
    def record(self) -> Record:
        return self.race.record

    def cell(self, racer: str) -> Cell:
        reason = None if self.in_a_row else self.race.out(racer)
        if reason:
            return reason.partition(":")[0]
        return self.race.median(racer, in_a_row=self.in_a_row)


def race_table(ran: Sequence[AttentionRace], name: str = "flash-race") -> Table | None:
    """All races: a row for each shape, a column for each implementation."""
    racers = list(dict.fromkeys(racer for race in ran for racer in race.case.racers))
    rows = [
        _Calls(race, in_a_row)
        for race in sorted(ran, key=lambda race: sort_key(race.case))
        for in_a_row in (False, True)
        if not in_a_row or any(race.median(racer, in_a_row=True) for racer in racers)
    ]
    calls = (
        f"single: by the GPU clock {_start(ran)}; consecutive: time per call of several calls, by"
        " the host clock"
    )
    options = "causal unless marked full; keys: heads of k and v; then the rule"
    columns = [
        col("batch,heads,length,d", lambda r: r.race.case.sizes, key=True, hint=options),
        col("dtype", lambda r: r.race.case.dtype, key=True),
        col("calls", lambda r: "consecutive" if r.in_a_row else "single", hint=calls),
        *(col(racer, partial(_Calls.cell, racer=racer), unit="ms") for racer in racers),
    ]
    title, caption = "All comparisons, forward + backward", "Medians of interleaved samples."
    return table(name, title, rows, columns, caption=caption) if rows else None
