"""Speed relative to peers, from the races of the flash study: ratios, findings and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from stepscope.records.schema import Record
from stepscope.records.stats import Ratio
from stepscope.report.blocks import Cell, Finding, Interval, Table
from stepscope.report.format import counted, duration, number
from stepscope.report.tables import col, table
from stepscope.studies.flash.cases import PUBLISHED_SHAPES
from stepscope.studies.flash.rows import OURS, AttentionRace, sort_key

PUBLISHED = tuple(shape.replace("x", ",") for shape in PUBLISHED_SHAPES)
LEADERBOARD = PUBLISHED[0]
"""The shape timed by the course's leaderboard."""
SHORT_PEER = "sdpa"


class Comparison(NamedTuple):
    """A peer and the shapes at which ours is compared with it."""

    peer: str
    shapes: tuple[str, ...]
    dtype: str = "bfloat16"


COMPARISONS = (
    Comparison("sdpa_flash", PUBLISHED),
    Comparison("flex", PUBLISHED),
    Comparison("sdpa_cudnn", PUBLISHED),
    Comparison("sdpa_efficient", ("1,16,4096,64",), "float32"),
)


class Compared(NamedTuple):
    """A race at one shape and the peer's time over ours in it."""

    race: AttentionRace
    ratio: Ratio


def compared(wanted: Comparison, ran: Sequence[AttentionRace]) -> list[Compared]:
    by_shape = {(race.case.sizes, race.case.dtype): race for race in ran}
    return [
        Compared(race, ratio)
        for sizes in wanted.shapes
        if (race := by_shape.get((sizes, wanted.dtype))) is not None
        and (ratio := race.ratio(wanted.peer)) is not None
    ]


def short_races(ran: Sequence[AttentionRace], ours: str) -> list[Compared]:
    """Ratios of consecutive calls with one head and a short length, which include host time."""
    return [
        Compared(race, ratio)
        for race in ran
        if race.case.is_short
        and race.times(OURS)
        and (ratio := race.ratio(SHORT_PEER, ours, in_a_row=True)) is not None
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
        pairs = compared(wanted, ran)
        if pairs:
            yield _against(wanted, pairs)
    leaderboard = [
        (race, times)
        for race in ran
        if (race.case.sizes, race.case.dtype) == (LEADERBOARD, "bfloat16")
        and (times := race.times(OURS))
    ]
    for race, times in leaderboard[-1:]:
        yield Finding(
            code="flash.leaderboard-shape",
            values={"ms": times.median, "low": times.low, "high": times.high},
            text=f"{LEADERBOARD} takes {duration(times.median)} forward and backward.",
            records=(race.record.id,),
        )
    for name in (OURS, "auto"):
        short = short_races(ran, name)
        if short:
            yield _short(name, short)
    for race in ran:
        for name in race.case.racers:
            out = race.out(name)
            if out and out.startswith("failed"):
                yield Finding(
                    code="flash.racer-failed",
                    values={"racer": name, "shape": race.case.sizes, "dtype": race.case.dtype},
                    text=f"{name} at {race.case.sizes} {race.case.dtype} {out}",
                    tone="warn",
                    records=(race.record.id,),
                )


def _against(wanted: Comparison, pairs: Sequence[Compared]) -> Finding:
    least, mean = lowest(pairs), geometric_mean(pairs)
    shapes = counted(len(wanted.shapes), "shape")
    missing = len(wanted.shapes) - len(pairs)
    over = f"{len(pairs)} of {shapes}" if missing else shapes
    return Finding(
        code="flash.against-peer",
        values={
            "peer": wanted.peer,
            "dtype": wanted.dtype,
            "mean": mean.value,
            "low": mean.low,
            "high": mean.high,
            "lowest": least.ratio.value,
            "shape": least.race.case.sizes,
            "missing": missing,
        },
        text=f"Relative to {wanted.peer} in {wanted.dtype} ours is {number(mean.value, 3)} times as"
        f" fast (geometric mean of {over}; lowest {number(least.ratio.value, 3)} at"
        f" {least.race.case.sizes}).",
        tone="good" if mean.low > 1 and not missing else "warn" if mean.high < 1 else "info",
        records=_ids(pairs),
    )


def _short(ours: str, pairs: Sequence[Compared]) -> Finding:
    least, mean = lowest(pairs), geometric_mean(pairs).value
    slower = sum(pair.ratio.high < 1.0 for pair in pairs)
    verdict = "slower than torch's SDPA at"
    return Finding(
        code="flash.short-calls",
        values={
            "ours": ours,
            "peer": SHORT_PEER,
            "mean": mean,
            "lowest": least.ratio.value,
            "shape": least.race.case.sizes,
            "slower": slower,
            "shapes": len(pairs),
        },
        text=f"In consecutive calls, host time included, {ours} is {number(mean, 3)} times as fast"
        f" as {SHORT_PEER} over {counted(len(pairs), 'shape')} with one head"
        f" (lowest {number(least.ratio.value, 3)} at {least.race.case.sizes}):"
        f" {f'{verdict} {slower}' if slower else f'{verdict} none'} of them.",
        tone="warn" if slower else "good",
        records=_ids(pairs),
    )


def _ids(pairs: Sequence[Compared]) -> tuple[str, ...]:
    return tuple(pair.race.record.id for pair in pairs)


class _Speed(NamedTuple):
    """A ratio to a peer and the medians it is computed from."""

    against: str
    shape: str
    ratio: Interval
    in_a_row: float | None = None
    ours: float | None = None
    peer: float | None = None


def speed_table(ran: Sequence[AttentionRace], name: str = "flash-speed") -> Table | None:
    shape = "batch, heads, length, d; bfloat16 unless marked fp32"
    measured = "the peer's median over ours, with its 95 % interval; above 1 ours is faster"
    in_a_row = "the same ratio of consecutive calls, by the host clock"
    columns = [
        col("against", lambda r: r.against),
        col("shape", lambda r: r.shape, hint=shape),
        col("measured", lambda r: r.ratio, unit="×", hint=measured),
        col("consecutive", lambda r: r.in_a_row, unit="×", hint=in_a_row),
        col("ours", lambda r: r.ours, unit="ms"),
        col("peer", lambda r: r.peer, unit="ms"),
    ]
    rows = [*_peer_rows(ran), *_short_rows(ran)]
    if not rows:
        return None
    return table(
        name,
        "Speed against peers, forward + backward, causal",
        rows,
        # A terminal is narrow: show the ratios without their times.
        columns[:-2] if name == "headline" else columns,
        caption=f"Ours is {OURS}, called through the public function. Samples are interleaved on"
        f" the same tensors in one process, timed by the device clock {_start(ran)}. Means are"
        " geometric. Short: the lowest ratio of the shapes with one head, consecutive calls by the"
        " host clock; auto: the same with auto as ours.",
    )


def _peer_rows(ran: Sequence[AttentionRace]) -> Iterator[_Speed]:
    for wanted in COMPARISONS:
        pairs, peer = compared(wanted, ran), wanted.peer
        suffix = "" if wanted.dtype == "bfloat16" else " fp32"
        for race, ratio in pairs:
            in_a_row = race.ratio(peer, in_a_row=True)
            yield _Speed(
                peer,
                race.case.sizes + suffix,
                _interval(ratio),
                in_a_row.value if in_a_row else None,
                race.median(OURS),
                race.median(peer),
            )
        if len(wanted.shapes) > 1 and pairs:
            yield _Speed(peer, f"mean of {len(pairs)}{suffix}", geometric_mean(pairs))


def _short_rows(ran: Sequence[AttentionRace]) -> Iterator[_Speed]:
    for ours in (OURS, "auto"):
        pairs = short_races(ran, ours)
        if pairs:
            race, ratio = lowest(pairs)
            yield _Speed(
                f"{SHORT_PEER}, {'short' if ours == OURS else ours}",
                race.case.sizes,
                _interval(ratio),
                ratio.value,
                race.median(ours, in_a_row=True),
                race.median(SHORT_PEER, in_a_row=True),
            )


def _interval(ratio: Ratio) -> Interval:
    return Interval(value=ratio.value, low=ratio.low, high=ratio.high)


def _start(ran: Sequence[AttentionRace]) -> str:
    if all(race.case.host_ahead for race in ran):
        return "with the host ahead, as in a training step whose queue is full"
    return "from an idle device, so that times of short kernels include host time"


class _Calls(NamedTuple):
    """A race timed by single calls or by consecutive calls."""

    race: AttentionRace
    in_a_row: bool

    @property
    def record(self) -> Record:
        return self.race.record

    def cell(self, racer: str) -> Cell:
        out = None if self.in_a_row else self.race.out(racer)
        median = self.race.median(racer, in_a_row=self.in_a_row)
        return out.partition(":")[0] if out else median


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
        f"single: by the device clock {_start(ran)}; consecutive: time per call of several calls,"
        " by the host clock"
    )
    columns = [
        col("batch,heads,length,d", lambda r: r.race.case.sizes, key=True),
        col("dtype", lambda r: r.race.case.dtype, key=True),
        col("calls", lambda r: "consecutive" if r.in_a_row else "single", hint=calls),
        *(col(racer, partial(_Calls.cell, racer=racer), unit="ms") for racer in racers),
    ]
    if not rows:
        return None
    caption = "Medians of interleaved samples."
    return table(name, "All races, forward + backward", rows, columns, caption=caption)
