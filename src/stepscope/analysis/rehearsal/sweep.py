"""Sweeps of replays over strategies, bucket sizes and numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from stepscope.analysis.rehearsal.cluster import Cluster
from stepscope.analysis.rehearsal.recording import Recording
from stepscope.analysis.rehearsal.replay import STRATEGIES, Channel, Replay, Upkeep, replay
from stepscope.analysis.rehearsal.sharded import replay_fsdp, replay_sharded

BUCKETS_MB = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
AS_GOOD = 1.01
"""Factor of the best step time within which bucket sizes count as equal."""
ALL = (*STRATEGIES, "sharded", "fsdp")
BUCKETED = ("bucketed", "sharded", "fsdp")
"""Strategies with a bucket size, or the size of a unit."""


class BucketSweep(NamedTuple):
    """Replays at several bucket sizes."""

    steps: dict[float, Replay]
    """Replays by bucket size in MiB."""

    @property
    def best(self) -> float:
        """Bucket size of the fastest step; among equal ones the largest, with fewest messages."""
        least = min(result.step_ms for result in self.steps.values())
        return max(
            size for size, result in self.steps.items() if result.step_ms <= least * (1 + 1e-9)
        )

    @property
    def as_good(self) -> tuple[float, float]:
        """Range of sizes whose step is within a hundredth of the best."""
        least = self.steps[self.best].step_ms
        good = [size for size, result in self.steps.items() if result.step_ms <= AS_GOOD * least]
        return min(good), max(good)


def sweep_buckets(
    recording: Recording,
    channel: Channel,
    sizes_mb: Iterable[float] = BUCKETS_MB,
    upkeep: Upkeep = Upkeep(),  # noqa: B008
) -> BucketSweep:
    """Replay at every bucket size."""
    return BucketSweep(
        {size: replay(recording, "bucketed", channel, size, upkeep) for size in sorted(sizes_mb)}
    )


def sweep_sizes(
    recording: Recording,
    strategy: str,
    cluster: Cluster,
    sizes_mb: Iterable[float] = BUCKETS_MB,
    upkeep: Upkeep = Upkeep(),  # noqa: B008
) -> BucketSweep:
    """Replay any strategy at every bucket size; without buckets, at one."""
    sizes = sorted(sizes_mb)
    return BucketSweep(
        {
            size: replay_any(recording, strategy, cluster, size, upkeep)
            for size in (sizes if strategy in BUCKETED else sizes[:1])
        }
    )


def replay_any(
    recording: Recording,
    strategy: str,
    cluster: Cluster,
    bucket_mb: float,
    upkeep: Upkeep = Upkeep(),  # noqa: B008
) -> Replay:
    """Replay with any strategy."""
    if strategy == "sharded":
        return replay_sharded(recording, cluster, bucket_mb, upkeep)
    if strategy == "fsdp":
        return replay_fsdp(recording, cluster, bucket_mb)
    return replay(recording, strategy, cluster.channel("all-reduce"), bucket_mb, upkeep)


class Scaling(NamedTuple):
    """Steps at growing numbers of ranks, each with its best bucket size."""

    kept: dict[int, Replay]
    """Replays by number of ranks, each with the recorded batch."""
    divided: dict[int, Replay]
    """Replays by number of ranks that share the recorded batch, at least one sequence each. A share
    is assumed to take its share of the time, which is optimistic: small batches use a device less
    efficiently."""

    def stops_paying(self, above: float) -> int | None:
        """Ranks from which on exposed communication is more than this share of the step."""
        first = None
        for ranks, result in self.kept.items():
            over = result.exposed_share > above
            first = (first or ranks) if over else None
        return first

    @property
    def fastest(self) -> int:
        """Fewest ranks with the shortest time for the recorded batch."""
        return min(self.divided, key=lambda ranks: (self.divided[ranks].step_ms, ranks))


def sweep_ranks(
    recording: Recording,
    cluster_of: Callable[[int], Cluster],
    ranks: Sequence[int],
    batch: float,
    sizes_mb: Sequence[float] = BUCKETS_MB,
    upkeep: Upkeep = Upkeep(),  # noqa: B008
) -> Scaling:
    """Replay at every number of ranks, each with its best bucket size."""

    def best(taken: Recording, count: int) -> Replay:
        channel = cluster_of(count).channel("all-reduce")
        sweep = sweep_buckets(taken, channel, sizes_mb, upkeep)
        return sweep.steps[sweep.best]

    return Scaling(
        {count: best(recording, count) for count in ranks},
        {count: best(recording.with_batch(1 / count), count) for count in ranks if count <= batch},
    )


def doublings(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … and `most` itself."""
    powers: list[int] = []
    while (power := 2 ** len(powers)) < most:
        powers.append(power)
    return (*powers, most)
