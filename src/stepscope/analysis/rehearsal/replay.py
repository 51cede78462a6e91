"""A recorded step played again with the reductions of a strategy in it.

The rules are those of `parallel/reducer.py`. Gradients become ready in the recorded order; what the
host or the device must do for each (scaling it into its bucket) and for each message (issuing it)
delays everything after it. Where that work and messages under way need the same cores, it takes
longer and they are late. Messages leave in the order of the plan and share one channel. At the end
of the backward the ranks exchange a small message, which runs beside reductions in flight; what has
not left yet leaves after it; the optimizer starts when the last reduction is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from stepscope.analysis.rehearsal.recording import Recording
from stepscope.errors import UsageError, unknown_name
from stepscope.parallel.buckets import MEGABYTE, Bucket, plan_buckets

STRATEGIES = ("naive", "flat", "overlap", "bucketed")


class Channel(Protocol):
    """What a reduction takes, in ms."""

    def alone(self, size: float) -> float:
        """From its start to its end."""

    def queued(self, size: float) -> float:
        """From its start until the next one can start."""


class Upkeep(NamedTuple):
    """What data parallelism costs beside the transfers, in ms."""

    pack: float = 0.0
    """For each gradient."""
    pack_byte: float = 0.0
    """For each byte of a gradient that is written into its bucket."""
    issue: float = 0.0
    """To send a message."""
    agree: float = 0.0
    """The exchange at the end of a backward."""
    slowed: float = 1.0
    """How many times as long packing and sending take while a message is under way."""
    drag: float = 0.0
    """By how much a ms of such work (as it is without messages) delays those under way."""


class Message(NamedTuple):
    bytes: int
    ready: float
    """When it could leave, from the start of the step in ms."""
    start: float
    end: float


class Replay(NamedTuple):
    strategy: str
    messages: tuple[Message, ...]
    forward_end: float
    backward_end: float
    synchronized: float
    """When every gradient is averaged."""
    step_ms: float
    exposed_ms: float
    """What the step takes longer than what a rank computes in it."""

    @property
    def communication_ms(self) -> float:
        """How long at least one reduction was under way."""
        total, until = 0.0, 0.0
        for message in sorted(self.messages, key=lambda message: message.start):
            total += max(0.0, message.end - max(message.start, until))
            until = max(until, message.end)
        return total

    @property
    def exposed_share(self) -> float:
        return self.exposed_ms / self.step_ms


class Line:
    """The links as a queue of one message after the other."""

    def __init__(self) -> None:
        self._free = 0.0
        self.sent: list[Message] = []

    def send(self, size: int, at: float, channel: Channel) -> float:
        """When it is done."""
        start = max(at, self._free)
        self._free = start + channel.queued(size)
        self.sent.append(Message(size, at, start, start + channel.alone(size)))
        return self.sent[-1].end

    def beside(self, at: float, work: float, upkeep: Upkeep) -> float:
        """How long this work takes from `at` on; messages under way end later for it."""
        if all(message.end <= at for message in self.sent):
            return work
        late = upkeep.drag * work
        self._free += late if self._free > at else 0.0
        self.sent = [
            m._replace(start=m.start + (late if m.start > at else 0.0), end=m.end + late)
            if m.end > at
            else m
            for m in self.sent
        ]
        return upkeep.slowed * work


def replay(
    recording: Recording,
    strategy: str,
    channel: Channel,
    bucket_mb: float = 25.0,
    upkeep: Upkeep = Upkeep(),  # noqa: B008
) -> Replay:
    buckets = plan(recording, strategy, bucket_mb)
    sizes = [sum(recording.gradients[place].bytes for place in b.items) for b in buckets]
    line = Line()
    eager = strategy in ("overlap", "bucketed")
    delay = _backward(recording, buckets, sizes, line, channel, upkeep) if eager else 0.0
    forward_end = recording.forward_ms
    backward_end = forward_end + recording.backward_ms + delay
    now = backward_end + upkeep.agree
    if not eager:
        for bucket, size in zip(buckets, sizes, strict=True):
            now += len(bucket.items) * upkeep.pack + size * upkeep.pack_byte + upkeep.issue
            end = line.send(size, now, channel)
            if strategy == "naive":
                now = end
    synchronized = max(now, *(message.end for message in line.sent))
    step = synchronized + recording.optimizer_ms
    return Replay(
        name_of(strategy, bucket_mb), tuple(line.sent), forward_end, backward_end, synchronized,
        step, step - recording.compute_ms,
    )  # fmt: skip


def _backward(
    recording: Recording,
    buckets: Sequence[Bucket],
    sizes: Sequence[int],
    line: Line,
    channel: Channel,
    upkeep: Upkeep,
) -> float:
    """Send what fills during the backward; by how much that delays its end."""
    bucket_of = {place: n for n, bucket in enumerate(buckets) for place in bucket.items}
    left = [len(bucket.items) for bucket in buckets]
    following, delay = 0, 0.0
    for place in recording.order:
        gradient = recording.gradients[place]
        ready = recording.forward_ms + gradient.ready
        packing = upkeep.pack + gradient.bytes * upkeep.pack_byte
        delay += line.beside(ready + delay, packing, upkeep)
        left[bucket_of[place]] -= 1
        while following < len(buckets) and left[following] == 0:
            delay += line.beside(ready + delay, upkeep.issue, upkeep)
            line.send(sizes[following], ready + delay, channel)
            following += 1
    return delay


def plan(recording: Recording, strategy: str, bucket_mb: float) -> tuple[Bucket, ...]:
    if strategy not in STRATEGIES:
        raise unknown_name("strategy", strategy, STRATEGIES)
    if not bucket_mb > 0:
        raise UsageError(f"bucket_mb is {bucket_mb:g}", "it must be above 0")
    limit = {"flat": float("inf"), "bucketed": bucket_mb * MEGABYTE}.get(strategy, 0.0)
    return plan_buckets([gradient.item for gradient in recording.gradients], limit)


def name_of(strategy: str, bucket_mb: float) -> str:
    return f"bucketed {bucket_mb:g} MiB" if strategy == "bucketed" else strategy
