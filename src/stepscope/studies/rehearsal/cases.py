"""Flags and cases of the rehearsal study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from stepscope.analysis.rehearsal.cluster import LINKS, make_cluster, max_ranks
from stepscope.errors import UsageError
from stepscope.training.flag_checks import check_at_least, check_each, check_known
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


class RehearsalFlags(WorkloadFlags, frozen=True, kw_only=True):
    """The step to record and the clusters to predict in the report; `rehearse` predicts others."""

    steps: int = 10
    """Number of steps to record."""
    ranks: tuple[int, ...] = (8, 64, 1024)
    """Numbers of ranks to predict."""
    link: tuple[str, ...] = tuple(LINKS)
    """Links of the predicted clusters: nvlink, infiniband, ethernet."""
    check_ranks: tuple[int, ...] = ()
    """Numbers of real ranks on this machine, over gloo, to compare with the prediction."""
    bucket_mb: tuple[float, ...] = (1.0, 4.0)
    """Bucket sizes on the real ranks, in MiB."""
    compute: Compute = "auto"
    """Real ranks compute (real) or wait for the recorded time (waits); auto waits if there are less
    than two cores per rank."""
    rounds: int = 9
    """Samples of each strategy on the real ranks."""

    def __post_init__(self) -> None:
        for name in ("ranks", "check_ranks"):
            for count in getattr(self, name):
                check_at_least(1, **{name: count})
        check_known("link", self.link, LINKS)
        if not (self.ranks and self.link):
            raise UsageError("no cluster to predict", "give --ranks and --link a value")
        if min(self.ranks) > max(map(max_ranks, self.link)):
            make_cluster(self.link[0], min(self.ranks))
        check_each("bucket-mb", self.bucket_mb, lambda size: size > 0, "give sizes above 0")
        check_at_least(1, steps=self.steps, rounds=self.rounds)


class RecordingCase(Workload, frozen=True, kw_only=True, tag_field="kind", tag="recording"):
    """A step to record and the clusters to predict for it."""

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
