"""Replay of a recorded step with the reductions of a data-parallel strategy.

The rules are those of `parallel/reducer.py`. Gradients become ready in the recorded order. The work
for each gradient (scaling it into its bucket) and for each message (issuing it) delays everything
after it. Messages are sent in the order of the plan and share one channel. At the end of the
backward pass the ranks exchange a small message, concurrently with reductions in flight; messages
not sent yet follow it; the optimizer starts when the last reduction is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from stepscope.analysis.rehearsal.recording import Recording
from stepscope.errors import UsageError, unknown_name
from stepscope.parallel.buckets import MEGABYTE, Bucket, plan_buckets

STRATEGIES = ("naive", "flat", "overlap", "bucketed")


class Channel(Protocol):
    """Cost of a reduction in ms."""

    def alone(self, size: float) -> float:
        """Return the time from its start to its end."""

    def queued(self, size: float) -> float:
        """Return the time from its start until the next one can start."""


class Upkeep(NamedTuple):
    """Cost of data parallelism besides the transfers, in ms."""

    pack: float = 0.0
    """Cost per gradient."""
    pack_byte: float = 0.0
    """Cost per byte of a gradient that is written into its bucket."""
    issue: float = 0.0
    """Cost of sending a message."""
    agree: float = 0.0
    """Exchange at the end of a backward pass."""


class Message(NamedTuple):
    """One reduction in time."""

    bytes: int
    ready: float
    """Earliest time it could be sent, in ms from the start of the step."""
    start: float
    end: float


class Replay(NamedTuple):
    """Timeline of one replayed step."""

    strategy: str
    messages: tuple[Message, ...]
    forward_end: float
    backward_end: float
    synchronized: float
    """Time at which all gradients are averaged."""
    step_ms: float
    exposed_ms: float
    """Step time beyond what a rank computes."""

    @property
    def communication_ms(self) -> float:
        """Time during which at least one reduction was in flight."""
        total, until = 0.0, 0.0
        for message in sorted(self.messages, key=lambda message: message.start):
            total += max(0.0, message.end - max(message.start, until))
            until = max(until, message.end)
        return total

    @property
    def exposed_share(self) -> float:
        return self.exposed_ms / self.step_ms


class MessageQueue:
    """Queue of messages that the links transfer one after the other."""

    def __init__(self) -> None:
        self._free = 0.0
        self.sent: list[Message] = []

    def send(self, size: int, at: float, channel: Channel) -> float:
        """Send a message and return when it is done."""
        start = max(at, self._free)
        self._free = start + channel.queued(size)
        self.sent.append(Message(size, at, start, start + channel.alone(size)))
        return self.sent[-1].end

    def work(self, at: float, ms: float) -> float:  # noqa: ARG002
        """Return how long a rank works on gradients from `at` on: as long as without messages,
        unless a subclass knows how they slow each other down."""
        return ms


def replay(
    recording: Recording,
    strategy: str,
    channel: Channel,
    bucket_mb: float = 25.0,
    upkeep: Upkeep = Upkeep(),  # noqa: B008
    queue: MessageQueue | None = None,
) -> Replay:
    """Replay the step with the reductions of one strategy."""
    queue = queue or MessageQueue()
    buckets = plan(recording, strategy, bucket_mb)
    sizes = [sum(recording.gradients[index].bytes for index in b.items) for b in buckets]
    eager = strategy in ("overlap", "bucketed")
    delay = _backward(recording, buckets, sizes, queue, channel, upkeep) if eager else 0.0
    forward_end = recording.forward_ms
    backward_end = forward_end + recording.backward_ms + delay
    now = backward_end + upkeep.agree
    if not eager:
        for bucket, size in zip(buckets, sizes, strict=True):
            now += len(bucket.items) * upkeep.pack + size * upkeep.pack_byte + upkeep.issue
            end = queue.send(size, now, channel)
            if strategy == "naive":
                now = end
    synchronized = max(now, *(message.end for message in queue.sent))
    step = synchronized + recording.optimizer_ms
    return Replay(
        name_of(strategy, bucket_mb),
        tuple(queue.sent),
        forward_end,
        backward_end,
        synchronized,
        step,
        step - recording.compute_ms,
    )


def _backward(
    recording: Recording,
    buckets: Sequence[Bucket],
    sizes: Sequence[int],
    queue: MessageQueue,
    channel: Channel,
    upkeep: Upkeep,
) -> float:
    """Send the buckets that fill during the backward pass; return by how much that delays its
    end."""
    bucket_of = {index: n for n, bucket in enumerate(buckets) for index in bucket.items}
    left = [len(bucket.items) for bucket in buckets]
    following, delay = 0, 0.0
    for index in recording.order:
        gradient = recording.gradients[index]
        ready = recording.forward_ms + gradient.ready
        packing = upkeep.pack + gradient.bytes * upkeep.pack_byte
        delay += queue.work(ready + delay, packing)
        left[bucket_of[index]] -= 1
        while following < len(buckets) and left[following] == 0:
            delay += queue.work(ready + delay, upkeep.issue)
            queue.send(sizes[following], ready + delay, channel)
            following += 1
    return delay


def plan(recording: Recording, strategy: str, bucket_mb: float) -> tuple[Bucket, ...]:
    """Assign the gradients to the buckets of a strategy."""
    if strategy not in STRATEGIES:
        raise unknown_name("strategy", strategy, STRATEGIES)
    if not bucket_mb > 0:
        raise UsageError(f"bucket_mb is {bucket_mb:g}", "it must be above 0")
    limit = {"flat": float("inf"), "bucketed": bucket_mb * MEGABYTE}.get(strategy, 0.0)
    return plan_buckets([gradient.item for gradient in recording.gradients], limit)


def name_of(strategy: str, bucket_mb: float) -> str:
    return f"bucketed {bucket_mb:g} MiB" if strategy == "bucketed" else strategy
