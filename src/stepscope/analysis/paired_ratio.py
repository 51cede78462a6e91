"""Two contestants who took turns, round by round: how long one takes as a multiple of the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stepscope.records.schema import Record
from stepscope.records.stats import Summary, summarize

STUDY = "parallel-against-torch"
"""The name under which `benchmarks/parallel_against_torch.py` keeps its records."""
OURS, THEIRS = "ours", "theirs"


class Paired(NamedTuple):
    wall: Summary
    """Ours over theirs, of the slowest rank in each round."""
    cpu: Summary
    """The same of the processor time of all threads of all ranks."""
    theirs_ms: float
    """The median of their step."""


def paired(record: Record) -> Paired:
    """Ratios of a record with the series `step` and `cpu` of both variants, by rank."""
    steps, spent = (
        [_by_round(record, kind, who) for who in (OURS, THEIRS)] for kind in ("step", "cpu")
    )
    slowest = [[max(ranks) for ranks in held] for held in steps]
    return Paired(
        wall=_ratio(*slowest),
        cpu=_ratio(*([sum(ranks) for ranks in held] for held in spent)),
        theirs_ms=summarize(slowest[1]).median,
    )


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> Summary:
    return summarize([mine / other for mine, other in zip(ours, theirs, strict=True)])


def _by_round(record: Record, name: str, variant: str) -> list[tuple[float, ...]]:
    ranks = (s.values for s in record.series if (s.name, s.variant) == (name, variant))
    return list(zip(*ranks, strict=True))
