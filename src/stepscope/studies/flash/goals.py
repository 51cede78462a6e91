"""What the races are to show: ratios of a peer's time to ours, and what they are held against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from stepscope.records.stats import Ratio
from stepscope.report.blocks import Interval
from stepscope.studies.flash.cases import is_short
from stepscope.studies.flash.rows import OURS, Race

PUBLISHED = ("1,16,16384,64", "4,16,4096,64", "4,16,4096,128", "2,16,16384,128", "8,16,1024,64")
LEADERBOARD, LEADERBOARD_MS = "1,16,16384,64", 4.7
SHORT_PEER = "sdpa"


class Goal(NamedTuple):
    """What the ratio of a peer's time to ours is to reach."""

    peer: str
    shapes: tuple[str, ...]
    dtype: str
    each: float | None = None
    mean: float | None = None


GOALS = (
    Goal("sdpa_flash", PUBLISHED, "bfloat16", each=1.2, mean=1.4),
    Goal("flex", PUBLISHED, "bfloat16", each=1.15),
    Goal("sdpa_cudnn", PUBLISHED, "bfloat16", mean=0.88),
    Goal("sdpa_efficient", ("1,16,4096,64",), "float32", each=1.3),
)


class Held(NamedTuple):
    """A peer at one shape: our race and the ratio it gave."""

    race: Race
    ratio: Ratio


def held(goal: Goal, ran: Sequence[Race]) -> list[Held]:
    by_shape = {(race.shape.sizes, race.shape.dtype): race for race in ran}
    found = []
    for sizes in goal.shapes:
        race = by_shape.get((sizes, goal.dtype))
        ratio = race.ratio(goal.peer) if race else None
        if race and ratio:
            found.append(Held(race, ratio))
    return found


def geometric_mean(ratios: Sequence[Ratio]) -> Interval:
    """Of the ratios; its ends are those of all of them, so the interval is on the wide side."""

    def mean(values: list[float]) -> float:
        return math.exp(math.fsum(map(math.log, values)) / len(values))

    return Interval(
        value=mean([r.value for r in ratios]),
        low=mean([r.low for r in ratios]),
        high=mean([r.high for r in ratios]),
    )


def short_races(ran: Sequence[Race], ours: str) -> list[Held]:
    """One head and a short length, calls in a row: what the host costs is inside."""
    return [
        Held(race, ratio)
        for race in ran
        if is_short(race.shape)
        and race.times(OURS)
        and (ratio := race.ratio(SHORT_PEER, ours, in_a_row=True)) is not None
    ]


def leaderboard_races(ran: Sequence[Race]) -> list[Race]:
    return [
        race
        for race in ran
        if (race.shape.sizes, race.shape.dtype) == (LEADERBOARD, "bfloat16") and race.times(OURS)
    ][-1:]
