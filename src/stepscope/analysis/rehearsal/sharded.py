"""Replay of a step in which ranks shard the optimizer's state, or everything.

`sharded`: gradients are reduce-scattered in buckets during the backward pass, each rank updates its
share, and the updated weights are gathered after it.

`fsdp`: weights are gathered before use, one unit ahead, in the forward pass and again in the
backward pass; gradients are reduce-scattered as units finish. A unit is a bucket of weights. The
recording has no marks inside the forward pass, so a unit's share of it is assumed to be its share
of the backward pass.
"""

from __future__ import annotations

from itertools import pairwise

from stepscope.analysis.rehearsal.cluster import Cluster
from stepscope.analysis.rehearsal.links import Links
from stepscope.analysis.rehearsal.recording import Recording
from stepscope.analysis.rehearsal.replay import MessageQueue, Replay, Upkeep, plan, replay


def replay_sharded(
    recording: Recording,
    cluster: Cluster,
    bucket_mb: float = 25.0,
    upkeep: Upkeep = Upkeep(),  # noqa: B008
) -> Replay:
    """Replay with a sharded optimizer (ZeRO stage 1)."""
    scattered = replay(recording, "bucketed", cluster.channel("reduce-scatter"), bucket_mb, upkeep)
    updated = scattered.synchronized + recording.optimizer_ms / cluster.ranks
    queue = MessageQueue()
    step = queue.send(recording.gradient_bytes, updated, cluster.channel("all-gather"))
    return scattered._replace(
        strategy="sharded",
        messages=(*scattered.messages, *queue.sent),
        step_ms=step,
        exposed_ms=step - _computed(recording, cluster.ranks),
    )


def replay_fsdp(recording: Recording, cluster: Links, unit_mb: float = 25.0) -> Replay:
    """Replay with fully sharded parameters."""
    units = plan(recording, "bucketed", unit_mb)
    sizes = [sum(recording.gradients[index].bytes for index in unit.items) for unit in units]
    ends = [max(recording.gradients[index].ready for index in unit.items) for unit in units]
    # A unit that finishes out of order delays the ones after it, not itself.
    for index in range(1, len(ends)):
        ends[index] = max(ends[index], ends[index - 1])
    backward = [end - begin for begin, end in pairwise([0.0, *ends])]
    rest = recording.backward_ms - ends[-1]
    forward = [recording.forward_ms * took / ends[-1] if ends[-1] else 0.0 for took in backward]
    queue, gather = MessageQueue(), cluster.channel("all-gather")
    now, gathered_at = 0.0, queue.send(sizes[-1], 0.0, gather)
    for index in reversed(range(len(units))):
        now = max(now, gathered_at)
        if index:
            gathered_at = queue.send(sizes[index - 1], now, gather)
        now += forward[index]
    forward_end = now
    gathered_at = queue.send(sizes[0], now, gather)
    for index in range(len(units)):
        now = max(now, gathered_at)
        if index + 1 < len(units):
            gathered_at = queue.send(sizes[index + 1], now, gather)
        now += backward[index]
        queue.send(sizes[index], now, cluster.channel("reduce-scatter"))
    now += rest
    synchronized = max(now, *(message.end for message in queue.sent))
    step = synchronized + recording.optimizer_ms / cluster.ranks
    return Replay(
        "fsdp",
        tuple(queue.sent),
        forward_end,
        now,
        synchronized,
        step,
        step - _computed(recording, cluster.ranks),
    )


def _computed(recording: Recording, ranks: int) -> float:
    """Compute time of a rank, which updates only its share of the parameters."""
    return recording.forward_ms + recording.backward_ms + recording.optimizer_ms / ranks
