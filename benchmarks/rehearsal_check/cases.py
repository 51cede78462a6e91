"""Flags and case of a rehearsal that is compared with real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from stepscope.training.flag_checks import check_at_least, check_each
from stepscope.training.flags import WorkloadFlags
from stepscope.training.workload import Workload

if TYPE_CHECKING:
    from stepscope.parallel.reducer import Strategy

Compute = Literal["auto", "real", "waits"]


class Sampled(NamedTuple):
    """Key of a series measured on ranks."""

    name: str
    """`step`; for messages `alone`, `burst`, `pack`, `packed`, `beside`; `issue`, `agree`."""
    variant: str = ""
    """Strategy of a step, or number of concurrent messages."""
    size: int = 0


def strategies(bucket_mb: Sequence[float]) -> list[tuple[Strategy, float]]:
    """Strategies run on real ranks with their bucket sizes, which only `bucketed` uses."""
    return [("naive", 1.0), ("flat", 1.0), ("overlap", 1.0), *(("bucketed", s) for s in bucket_mb)]


class CheckFlags(WorkloadFlags, frozen=True, kw_only=True):
    """The step to record, and the ranks of this machine that run it, over gloo."""

    steps: int = 10
    """Number of steps to record."""
    ranks: tuple[int, ...] = (2, 4)
    """Numbers of ranks to compare with the prediction."""
    bucket_mb: tuple[float, ...] = (1.0, 4.0)
    """Bucket sizes on the ranks, in MiB."""
    compute: Compute = "auto"
    """Ranks compute (real) or wait for the recorded time (waits); auto waits if there are less than
    two cores per rank."""
    rounds: int = 9
    """Samples of each strategy on the ranks."""

    def __post_init__(self) -> None:
        for count in self.ranks:
            check_at_least(1, ranks=count)
        check_each("bucket-mb", self.bucket_mb, lambda size: size > 0, "give sizes above 0")
        check_at_least(1, steps=self.steps, rounds=self.rounds)


class CheckCase(Workload, frozen=True, kw_only=True):
    """A step to record, predict and run on real ranks."""

    steps: int
    ranks: int
    bucket_mb: tuple[float, ...]
    rounds: int
    compute: Compute

    @property
    def key(self) -> str:
        return f"{super().key}_check_r{self.ranks}_{self.compute}"
