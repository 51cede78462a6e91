"""What the races say, in sentences that carry their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.report.blocks import Finding
from stepscope.report.format import duration, number
from stepscope.studies.flash.goals import (
    GOALS,
    LEADERBOARD,
    LEADERBOARD_MS,
    SHORT_PEER,
    Goal,
    Held,
    geometric_mean,
    held,
    leaderboard_races,
    short_races,
)
from stepscope.studies.flash.rows import OURS, Race


def speed_findings(ran: Sequence[Race]) -> Iterator[Finding]:
    for goal in GOALS:
        found = held(goal, ran)
        if found:
            yield _against(goal, found)
    for race in leaderboard_races(ran):
        ours = race.times(OURS)
        assert ours is not None
        reached = ours.median <= LEADERBOARD_MS
        yield Finding(
            text=f"{LEADERBOARD} takes {duration(ours.median)} forward and backward; the goal"
            f" of {number(LEADERBOARD_MS, 2)} ms is {'reached' if reached else 'missed'}.",
            tone="good" if reached else "warn",
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


def _against(goal: Goal, found: Sequence[Held]) -> Finding:
    least = min(found, key=lambda pair: pair.ratio.value)
    mean = geometric_mean([ratio for _, ratio in found]).value
    wanted, reached = [], True
    if goal.mean is not None:
        wanted.append(f"{goal.mean:g}× on average")
        reached &= mean >= goal.mean
    if goal.each is not None:
        wanted.append(f"{goal.each:g}× at each shape")
        reached &= least.ratio.value >= goal.each
    missing = len(goal.shapes) - len(found)
    text = (
        f"Against {goal.peer} in {goal.dtype} ours is {number(mean, 3)} times as fast"
        f" (geometric mean of {_shapes(found)}; lowest {number(least.ratio.value, 3)} at"
        f" {least.race.shape.sizes}). The goal, {' and '.join(wanted)}, is"
        f" {'reached' if reached else 'not reached'}"
        f"{f' where it was measured; {missing} shapes were not' if missing else ''}."
    )
    return Finding(text=text, tone="good" if reached and not missing else "warn")


def _short(ours: str, found: Sequence[Held]) -> Finding:
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
        f" {SHORT_PEER} over {_shapes(found)} with one head (lowest {number(least.ratio.value, 3)}"
        f" at {least.race.shape.sizes}): {verdict}.",
        tone="warn" if slower else "good",
    )


def _shapes(found: Sequence[Held]) -> str:
    return "1 shape" if len(found) == 1 else f"{len(found)} shapes"
