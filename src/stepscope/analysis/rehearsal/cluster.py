"""Cost model of a cluster, and the time of a collective on it.

A link is α + β·bytes: the cost of a hop and of a byte. An all-reduce of n bytes among N ranks takes
2(N-1) hops of n/N bytes around a ring, or up and down a tree in 2·log2(N) hops at 2n bytes of
traffic; the faster is used, as in NCCL. Reduce-scatter and all-gather are half a ring. If ranks
share nodes, a message is first reduced inside the node, then each rank reduces its share with its
counterparts in other nodes over its own network port, then it is gathered inside the node. Ranks of
one large node can do the same in groups over the links of the node; the faster is used.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from stepscope.errors import UsageError, unknown_name

Collective = Literal["all-reduce", "reduce-scatter", "all-gather"]


class Wire(NamedTuple):
    """Link from one rank to its neighbor."""

    latency_ms: float
    bytes_per_ms: float


class Cluster(NamedTuple):
    """Ranks in nodes with two kinds of links."""

    name: str
    ranks: int
    per_node: int
    """Ranks that share a node; 1 if the network is the only link."""
    inside: Wire
    between: Wire
    start_ms: float = 0.0
    """Cost of a collective before its first byte."""

    def time(self, collective: Collective, size: float) -> float:
        """Time in ms of one collective with a message of this many bytes in total."""
        if self.ranks == 1:
            return 0.0
        if self.per_node < self.ranks or self.ranks <= NODE:
            return self._time(collective, size)
        # A ring of all ranks has many hops; groups, as of several nodes, have fewer.
        grouped = self._replace(per_node=NODE, between=self.inside)
        return min(self._time(collective, size), grouped._time(collective, size))

    def _time(self, collective: Collective, size: float) -> float:
        local = min(self.per_node, self.ranks)
        nodes = math.ceil(self.ranks / local)
        # The last node may have fewer ranks, and so fewer ports.
        ports = self.ranks - (nodes - 1) * local
        if collective == "all-reduce" and local == 1:
            return self.start_ms + all_reduce_ms(self.between, nodes, size)
        inside = ring_half_ms(self.inside, local, size)
        if collective != "all-reduce":
            return self.start_ms + inside + ring_half_ms(self.between, nodes, size / ports)
        # Inside one node there is no second level: ring or tree as well.
        split = 2 * inside + all_reduce_ms(self.between, nodes, size / ports)
        direct = all_reduce_ms(self.inside, local, size) if nodes == 1 else split
        return self.start_ms + min(split, direct)

    def channel(self, collective: Collective) -> SharedLinks:
        return SharedLinks(self, collective)


class SharedLinks(NamedTuple):
    """Collectives of one kind on a cluster: each uses the links alone until it is done."""

    cluster: Cluster
    collective: Collective

    def alone(self, size: float) -> float:
        return self.cluster.time(self.collective, size)

    def queued(self, size: float) -> float:
        return self.alone(size)


def ring_half_ms(wire: Wire, ranks: int, size: float) -> float:
    return (ranks - 1) * (wire.latency_ms + size / ranks / wire.bytes_per_ms)


def all_reduce_ms(wire: Wire, ranks: int, size: float) -> float:
    if ranks == 1:
        return 0.0
    hops = math.ceil(math.log2(ranks))
    tree = 2 * hops * wire.latency_ms + 2 * size / wire.bytes_per_ms
    return min(2 * ring_half_ms(wire, ranks, size), tree)


NODE = 8
MAX_NVLINK_RANKS = 72
"""GPUs of the largest NVLink domain on sale (NVL72)."""

# Bandwidths are one direction of the data sheet: NVLink 4 has 18 links of 25 GB/s, NDR InfiniBand
# 400 Gb/s, both per GPU. Latencies per hop and the start are those of NCCL's own cost model for its
# bandwidth protocol (3.4 µs, 14 µs, 8.4 µs); that of Ethernet, through the CPU's TCP, is assumed.
NVLINK = Wire(3.4e-3, 450e6)
INFINIBAND = Wire(14e-3, 50e6)
ETHERNET = Wire(30e-3, 12.5e6)
START_MS = 8.4e-3

LINKS = {
    "nvlink": "every rank in one NVLink domain, 450 GB/s each way and 3.4 µs a hop",
    "infiniband": f"nodes of {NODE} over NVLink, between them 50 GB/s and 14 µs for each GPU",
    "ethernet": f"nodes of {NODE} over NVLink, between them 12.5 GB/s and 30 µs for each GPU",
}


def make_cluster(link: str, ranks: int) -> Cluster:
    """Return a preset cluster by name."""
    if link not in LINKS:
        raise unknown_name("link", link, LINKS)
    _require_ranks(ranks)
    if ranks > max_ranks(link):
        raise UsageError(
            f"no NVLink domain has {ranks:,} GPUs: the largest has {MAX_NVLINK_RANKS}",
            f"use infiniband: nodes of {NODE} over NVLink, InfiniBand between them",
        )
    if link == "nvlink":
        return Cluster(link, ranks, ranks, NVLINK, NVLINK, START_MS)
    between = INFINIBAND if link == "infiniband" else ETHERNET
    return Cluster(link, ranks, NODE, NVLINK, between, START_MS)


def max_ranks(link: str) -> float:
    """Return the most ranks that a preset link connects."""
    return MAX_NVLINK_RANKS if link == "nvlink" else math.inf


def custom_cluster(
    ranks: int, latency_us: float, bandwidth_gbs: float, per_node: int = 1
) -> Cluster:
    """Return a cluster with user-defined links; with `per_node`, NVLink inside the nodes."""
    _require_ranks(ranks)
    if not (math.isfinite(latency_us) and latency_us >= 0):
        raise UsageError(f"latency_us is {latency_us:g}", "it must be 0 or above")
    if not (math.isfinite(bandwidth_gbs) and bandwidth_gbs > 0):
        raise UsageError(f"bandwidth_gbs is {bandwidth_gbs:g}", "it must be above 0")
    if per_node < 1:
        raise UsageError(f"per_node is {per_node}", "it must be at least 1")
    if per_node > MAX_NVLINK_RANKS:
        raise UsageError(
            f"per_node is {per_node:,}: the largest NVLink domain has {MAX_NVLINK_RANKS} GPUs",
            "give the size of a node",
        )
    wire = Wire(latency_us / 1e3, bandwidth_gbs * 1e6)
    name = f"{bandwidth_gbs:g} GB/s, {latency_us:g} µs"
    if per_node > 1:
        name += f" between nodes of {per_node}"
    return Cluster(name, ranks, per_node, NVLINK, wire)


def _require_ranks(ranks: int) -> None:
    if ranks < 1:
        raise UsageError(f"ranks is {ranks}", "it must be at least 1")
