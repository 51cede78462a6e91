"""The links of a recorded job, as its own collectives show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from stepscope.analysis.rehearsal.cluster import Collective, make_cluster, max_ranks
from stepscope.analysis.rehearsal.replay import Channel

_INSIDE, _BETWEEN = "nvlink", "infiniband"


class Links(Protocol):
    """Ranks, and what each kind of collective takes between them."""

    @property
    def ranks(self) -> int: ...

    def channel(self, collective: Collective) -> Channel: ...


class Measured(NamedTuple):
    """A line through what the messages of a step took."""

    latency_ms: float
    byte_ms: float

    def alone(self, size: float) -> float:
        return self.latency_ms + size * self.byte_ms

    def queued(self, size: float) -> float:
        return self.alone(size)


class MeasuredLinks(NamedTuple):
    """The links of a recorded job."""

    ranks: int
    channels: Mapping[Collective, Measured]

    def channel(self, collective: Collective) -> Channel:
        return self.channels[collective]


def measured(
    collective: Collective, ranks: int, took_ms: float, messages: float, size: float
) -> Measured:
    """Return the line for messages that together took this long and have this many bytes. Its
    latency is that of the data sheet: one sum does not show it."""
    link = _INSIDE if ranks <= max_ranks(_INSIDE) else _BETWEEN
    least = make_cluster(link, ranks).time(collective, 0.0)
    latency = min(least, took_ms / messages)
    return Measured(latency, (took_ms - messages * latency) / size)
