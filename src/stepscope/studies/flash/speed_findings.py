"""What the races say, in sentences that carry their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.report.blocks import Finding, Tone
from stepscope.report.format import duration, number
from stepscope.studies.flash.comparisons import (
    COMPARISONS,
    LEADERBOARD,
    SHORT_PEER,
    Compared,
    Comparison,
    compared,
    geometric_mean,
    leaderboard_race,
    short_races,
)
from stepscope.studies.flash.rows import OURS, Race


def speed_findings(ran: Sequence[Race]) -> Iterator[Finding]:
    for wanted in COMPARISONS:
        found = compared(wanted, ran)
        if found:
            yield _against(wanted, found)
    race = leaderboard_race(ran)
    if race is not None and (ours := race.times(OURS)) is not None:
        yield Finding(
            code="flash.leaderboard-shape",
            values={"ms": ours.median, "low": ours.low, "high": ours.high},
            text=f"{LEADERBOARD} takes {duration(ours.median)} forward and backward.",
            records=(race.record.id,),
        )
    for name in (OURS, "auto"):
        short = short_races(ran, name)
        if short:
            yield _short(name, short)
    left = {
        f"{name} at {race.shape.sizes} {race.shape.dtype}": out
        for race in ran
        for name in race.racers
        if (out := race.out(name)) and out.startswith("failed")
    }
    for who, why in left.items():
        yield Finding(text=f"{who} {why}", tone="warn")


def _against(wanted: Comparison, found: Sequence[Compared]) -> Finding:
    least = min(found, key=lambda pair: pair.ratio.value)
    mean = geometric_mean([ratio for _, ratio in found])
    missing = len(wanted.shapes) - len(found)
    over = f"{len(found)} of {_shapes(len(wanted.shapes))}" if missing else _shapes(len(found))
    return Finding(
        code="flash.against-peer",
        values={
            "peer": wanted.peer, "dtype": wanted.dtype, "mean": mean.value, "low": mean.low,
            "high": mean.high, "lowest": least.ratio.value, "shape": least.race.shape.sizes,
            "missing": missing,
        },
        text=f"Against {wanted.peer} in {wanted.dtype} ours is {number(mean.value, 3)} times as"
        f" fast (geometric mean of {over}; lowest {number(least.ratio.value, 3)} at"
        f" {least.race.shape.sizes}).",
        tone=_tone(mean.low > 1 and not missing, mean.high < 1),
        records=tuple(race.record.id for race, _ in found),
    )  # fmt: skip


def _short(ours: str, found: Sequence[Compared]) -> Finding:
    least = min(found, key=lambda pair: pair.ratio.value)
    mean = geometric_mean([ratio for _, ratio in found]).value
    slower = sum(ratio.high < 1.0 for _, ratio in found)
    verdict = (
        f"slower than torch's own call at {slower} of them"
        if slower
        else "shown slower than torch's own call at none of them"
    )
    return Finding(
        text=f"With the host's share inside, {ours} is {number(mean, 3)} times as fast as"
        f" {SHORT_PEER} over {_shapes(len(found))} with one head"
        f" (lowest {number(least.ratio.value, 3)} at {least.race.shape.sizes}): {verdict}.",
        tone="warn" if slower else "good",
    )


def _tone(faster: bool, slower: bool) -> Tone:
    return "good" if faster else "warn" if slower else "info"


def _shapes(count: int) -> str:
    return "1 shape" if count == 1 else f"{count} shapes"
