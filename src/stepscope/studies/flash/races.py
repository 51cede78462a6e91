"""Speed against peers, from the races of the flash study: ratios, findings and tables."""

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
"""The shape that the course's leaderboard times."""
SHORT_PEER = "sdpa"


class Comparison(NamedTuple):
    """A peer, and the shapes at which ours is compared with it."""

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
    """A race at one shape, and the peer's time over ours in it."""

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
    """One head and a short length, consecutive calls: the host's time is inside."""
    return [
        Compared(race, ratio)
        for race in ran
        if race.case.is_short
        and race.times(OURS)
        and (ratio := race.ratio(SHORT_PEER, ours, in_a_row=True)) is not None
    ]


def lowest(found: Sequence[Compared]) -> Compared:
    return min(found, key=lambda pair: pair.ratio.value)


def geometric_mean(found: Sequence[Compared]) -> Interval:
    """The mean of ratios; its ends are the means of theirs, so the interval is on the wide side."""

    def mean(name: str) -> float:
        logs = (math.log(getattr(pair.ratio, name)) for pair in found)
        return math.exp(math.fsum(logs) / len(found))

    return Interval(value=mean("value"), low=mean("low"), high=mean("high"))


def race_findings(ran: Sequence[AttentionRace]) -> Iterator[Finding]:
    for wanted in COMPARISONS:
        found = compared(wanted, ran)
        if found:
            yield _against(wanted, found)
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


def _against(wanted: Comparison, found: Sequence[Compared]) -> Finding:
    least, mean = lowest(found), geometric_mean(found)
    shapes = counted(len(wanted.shapes), "shape")
    missing = len(wanted.shapes) - len(found)
    over = f"{len(found)} of {shapes}" if missing else shapes
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
        text=f"Against {wanted.peer} in {wanted.dtype} ours is {number(mean.value, 3)} times as"
        f" fast (geometric mean of {over}; lowest {number(least.ratio.value, 3)} at"
        f" {least.race.case.sizes}).",
        tone="good" if mean.low > 1 and not missing else "warn" if mean.high < 1 else "info",
        records=_ids(found),
    )


def _short(ours: str, found: Sequence[Compared]) -> Finding:
    least, mean = lowest(found), geometric_mean(found).value
    slower = sum(pair.ratio.high < 1.0 for pair in found)
    verdict = "slower than torch's own call at"
    return Finding(
        code="flash.short-calls",
        values={
            "ours": ours,
            "peer": SHORT_PEER,
            "mean": mean,
            "lowest": least.ratio.value,
            "shape": least.race.case.sizes,
            "slower": slower,
            "shapes": len(found),
        },
        text=f"With the host's share inside, {ours} is {number(mean, 3)} times as fast as"
        f" {SHORT_PEER} over {counted(len(found), 'shape')} with one head"
        f" (lowest {number(least.ratio.value, 3)} at {least.race.case.sizes}):"
        f" {f'{verdict} {slower}' if slower else f'shown {verdict} none'} of them.",
        tone="warn" if slower else "good",
        records=_ids(found),
    )


def _ids(found: Sequence[Compared]) -> tuple[str, ...]:
    return tuple(pair.race.record.id for pair in found)


class _Speed(NamedTuple):
    """A ratio to a peer, and the medians that it is made of."""

    against: str
    shape: str
    ratio: Interval
    in_a_row: float | None = None
    ours: float | None = None
    peer: float | None = None


def speed_table(ran: Sequence[AttentionRace], name: str = "flash-speed") -> Table | None:
    shape = "batch, heads, length, d; bfloat16 unless it says fp32"
    measured = "the peer's median over ours, with its 95 % interval; above 1 ours is faster"
    in_a_row = "the same ratio of calls that follow each other, by the host's clock"
    columns = [
        col("against", lambda r: r.against),
        col("shape", lambda r: r.shape, hint=shape),
        col("measured", lambda r: r.ratio, unit="×", hint=measured),
        col("in a row", lambda r: r.in_a_row, unit="×", hint=in_a_row),
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
        # A terminal is narrow: there the ratios come without the times that they are made of.
        columns[:-2] if name == "headline" else columns,
        caption=f"Ours is {OURS}, called as everyone calls it. All ran in turns, sample by sample,"
        f" on the same tensors in one process, by the device's clock {_start(ran)}. Means are"
        " geometric. Short: the lowest of the shapes with one head, calls in a row by the host's"
        " clock; auto: the same with auto as ours.",
    )


def _peer_rows(ran: Sequence[AttentionRace]) -> Iterator[_Speed]:
    for wanted in COMPARISONS:
        found, peer = compared(wanted, ran), wanted.peer
        suffix = "" if wanted.dtype == "bfloat16" else " fp32"
        for race, ratio in found:
            in_a_row = race.ratio(peer, in_a_row=True)
            yield _Speed(
                peer,
                race.case.sizes + suffix,
                _interval(ratio),
                in_a_row.value if in_a_row else None,
                race.median(OURS),
                race.median(peer),
            )
        if len(wanted.shapes) > 1 and found:
            yield _Speed(peer, f"mean of {len(found)}{suffix}", geometric_mean(found))


def _short_rows(ran: Sequence[AttentionRace]) -> Iterator[_Speed]:
    for ours in (OURS, "auto"):
        found = short_races(ran, ours)
        if found:
            race, ratio = lowest(found)
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
    return "from an idle device, so that the host's time is inside where kernels are short"


class _Calls(NamedTuple):
    """One way of timing a race."""

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
    """Every race in full: a row for each shape, a column for each implementation."""
    racers = list(dict.fromkeys(racer for race in ran for racer in race.case.racers))
    rows = [
        _Calls(race, in_a_row)
        for race in sorted(ran, key=lambda race: sort_key(race.case))
        for in_a_row in (False, True)
        if not in_a_row or any(race.median(racer, in_a_row=True) for racer in racers)
    ]
    calls = (
        f"alone: by the device's clock {_start(ran)}; in a row: several calls by the host's clock,"
        " the time of one"
    )
    columns = [
        col("batch,heads,length,d", lambda r: r.race.case.sizes, key=True),
        col("dtype", lambda r: r.race.case.dtype, key=True),
        col("calls", lambda r: "in a row" if r.in_a_row else "alone", hint=calls),
        *(col(racer, partial(_Calls.cell, racer=racer), unit="ms") for racer in racers),
    ]
    if not rows:
        return None
    caption = "Medians of samples taken in turns."
    return table(name, "Races in full, forward + backward", rows, columns, caption=caption)
