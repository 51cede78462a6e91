"""Time ratio of two implementations that ran interleaved, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stepscope.records.schema import Record
from stepscope.records.stats import Summary, summarize

STUDY = "parallel-against-torch"
"""Study name of the records of `benchmarks/parallel_against_torch.py`."""
STEPSCOPE, BASELINE = "stepscope", "baseline"
"""Variants of the series of these records."""


class Paired(NamedTuple):
    """Interleaved comparison of two implementations."""

    wall: Summary
    """Stepscope over baseline, slowest rank of each round."""
    cpu: Summary
    """Stepscope over baseline, CPU time of all threads of all ranks."""
    baseline_ms: float
    """Median step of the baseline."""


def paired(record: Record) -> Paired:
    """Compute the ratios of a record with the series `step` and `cpu` of both variants, by rank."""
    steps, spent = (
        [_by_round(record, kind, side) for side in (STEPSCOPE, BASELINE)]
        for kind in ("step", "cpu")
    )
    slowest = [[max(ranks) for ranks in rounds] for rounds in steps]
    return Paired(
        wall=_ratio(*slowest),
        cpu=_ratio(*([sum(ranks) for ranks in rounds] for rounds in spent)),
        baseline_ms=summarize(slowest[1]).median,
    )


def _ratio(stepscope: Sequence[float], baseline: Sequence[float]) -> Summary:
    return summarize([own / other for own, other in zip(stepscope, baseline, strict=True)])


def _by_round(record: Record, name: str, variant: str) -> list[tuple[float, ...]]:
    ranks = (s.values for s in record.series if (s.name, s.variant) == (name, variant))
    return list(zip(*ranks, strict=True))
