"""Flags, cases and presets of rehearsals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from stepscope.analysis.rehearsal.cluster import LINKS
from stepscope.errors import UsageError, unknown_name
from stepscope.studies.flag_checks import check_each
from stepscope.studies.training.workload import Workload, WorkloadFlags

if TYPE_CHECKING:
    from stepscope.parallel.reducer import Strategy

Compute = Literal["auto", "real", "waits"]


class Sampled(NamedTuple):
    """What a series of the ranks is of."""

    name: str
    """`step`; of messages: `alone`, `burst`, `pack`, `packed`, `beside`; `issue`, `agree`."""
    variant: str = ""
    """The way of a step, or how many messages at once."""
    size: int = 0


def strategies(bucket_mb: Sequence[float]) -> list[tuple[Strategy, float]]:
    """Strategies of the real ranks with their bucket sizes, which only `bucketed` uses."""
    return [("naive", 1.0), ("flat", 1.0), ("overlap", 1.0), *(("bucketed", s) for s in bucket_mb)]


class RehearsalFlags(WorkloadFlags, frozen=True, kw_only=True):
    """What to record, and which clusters the page answers for; `rehearse` answers for others."""

    steps: int = 10
    """Steps to record."""
    ranks: tuple[int, ...] = (8, 64, 1024)
    """Numbers of ranks to predict."""
    link: tuple[str, ...] = tuple(LINKS)
    """Links to predict: nvlink, infiniband, ethernet."""
    check_ranks: tuple[int, ...] = ()
    """Numbers of real ranks, over gloo on this machine, to hold the prediction against."""
    bucket_mb: tuple[float, ...] = (1.0, 4.0)
    """Bucket sizes of the real ranks, in MiB."""
    compute: Compute = "auto"
    """Real ranks compute, or wait as long as was recorded; auto waits below two cores a rank."""
    rounds: int = 9
    """Samples of each way on the real ranks."""

    def __post_init__(self) -> None:
        for name in ("ranks", "check_ranks"):
            for ranks in getattr(self, name):
                if ranks < 1:
                    raise UsageError(f"{name} has {ranks}", "give numbers from 1 on")
        for link in self.link:
            if link not in LINKS:
                raise unknown_name("link", link, LINKS)
        if not (self.ranks and self.link):
            raise UsageError("there is no cluster to predict", "give --ranks and --link a value")
        check_each("bucket-mb", self.bucket_mb, lambda size: size > 0, "give sizes above 0")
        if self.steps < 1 or self.rounds < 1:
            raise UsageError("steps and rounds must be at least 1")


class RecordingCase(Workload, frozen=True, kw_only=True, tag_field="kind", tag="recording"):
    """A step to record, and the clusters that its section of the page predicts."""

    steps: int
    ranks: tuple[int, ...]
    link: tuple[str, ...]


class CheckCase(Workload, frozen=True, kw_only=True, tag_field="kind", tag="check"):
    """A step to record, predict and run on real ranks."""

    steps: int
    ranks: int
    bucket_mb: tuple[float, ...]
    rounds: int
    compute: Compute

    @property
    def key(self) -> str:
        return f"{super().key}_check_r{self.ranks}_{self.compute}"


RehearsalCase = RecordingCase | CheckCase
