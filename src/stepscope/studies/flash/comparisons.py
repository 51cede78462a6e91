"""Ratios of a peer's time to ours, from the races of the flash study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from stepscope.records.stats import Ratio
from stepscope.report.blocks import Interval
from stepscope.studies.flash.cases import is_short
from stepscope.studies.flash.rows import OURS, Race

PUBLISHED = ("1,16,16384,64", "4,16,4096,64", "4,16,4096,128", "2,16,16384,128", "8,16,1024,64")
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

    race: Race
    ratio: Ratio


def compared(wanted: Comparison, ran: Sequence[Race]) -> list[Compared]:
    by_shape = {(race.shape.sizes, race.shape.dtype): race for race in ran}
    return [
        Compared(race, ratio)
        for sizes in wanted.shapes
        if (race := by_shape.get((sizes, wanted.dtype))) is not None
        and (ratio := race.ratio(wanted.peer)) is not None
    ]


def geometric_mean(ratios: Sequence[Ratio]) -> Interval:
    """The mean of ratios; its ends are the means of theirs, so the interval is on the wide side."""

    def mean(values: list[float]) -> float:
        return math.exp(math.fsum(map(math.log, values)) / len(values))

    return Interval(
        value=mean([r.value for r in ratios]),
        low=mean([r.low for r in ratios]),
        high=mean([r.high for r in ratios]),
    )


def short_races(ran: Sequence[Race], ours: str) -> list[Compared]:
    """One head and a short length, consecutive calls: the host's time is inside."""
    return [
        Compared(race, ratio)
        for race in ran
        if is_short(race.shape)
        and race.times(OURS)
        and (ratio := race.ratio(SHORT_PEER, ours, in_a_row=True)) is not None
    ]


def leaderboard_race(ran: Sequence[Race]) -> Race | None:
    """The last race of the leaderboard's shape in which ours ran."""
    found = [
        race
        for race in ran
        if (race.shape.sizes, race.shape.dtype) == (LEADERBOARD, "bfloat16") and race.times(OURS)
    ]
    return found[-1] if found else None
