"""Flags and cases of the rehearsal study."""

from __future__ import annotations

from stepscope.analysis.rehearsal.cluster import LINKS, make_cluster, max_ranks
from stepscope.errors import UsageError
from stepscope.training.flag_checks import check_at_least, check_known
from stepscope.training.flags import WorkloadFlags
from stepscope.training.workload import Workload


class RehearsalFlags(WorkloadFlags, frozen=True, kw_only=True):
    """The step to record and the clusters to predict in the report; `rehearse` predicts others."""

    steps: int = 10
    """Number of steps to record."""
    ranks: tuple[int, ...] = (8, 64, 1024)
    """Numbers of ranks to predict."""
    link: tuple[str, ...] = tuple(LINKS)
    """Links of the predicted clusters: nvlink, infiniband, ethernet."""

    def __post_init__(self) -> None:
        for count in self.ranks:
            check_at_least(1, ranks=count)
        check_known("link", self.link, LINKS)
        if not (self.ranks and self.link):
            raise UsageError("no cluster to predict", "give --ranks and --link a value")
        if min(self.ranks) > max(map(max_ranks, self.link)):
            make_cluster(self.link[0], min(self.ranks))
        check_at_least(1, steps=self.steps)


class RecordingCase(Workload, frozen=True, kw_only=True, tag_field="kind", tag="recording"):
    """A step to record and the clusters to predict for it."""

    steps: int
    ranks: tuple[int, ...]
    link: tuple[str, ...]
