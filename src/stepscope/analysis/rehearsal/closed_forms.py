"""Communication against compute in closed form, for four ways to divide a model among ranks.

A way is communication-bound where its communication takes longer than the compute that it could
hide behind. With P parameters, g bytes a gradient or weight, a bytes an activation, F FLOP/s of a
rank, B bytes/s of its link, L layers of width d:

    data      2(N-1)/N·g·P/B against the backward, 4·P·tokens/F
    FSDP      3(N-1)/N·g·P/B against forward and backward, 6·P·tokens/F
    tensor    4·L all-reduces of a·d·tokens, 8·L·(N-1)/N·a·d·tokens/B, against 6·P·tokens/(N·F)
    2-D       tensor inside groups of T ranks, FSDP of P/T parameters among N/T groups

The first two have a number of tokens above which they hide: g·F/(2B)·(N-1)/N for both. For tensor
parallelism both sides grow with the tokens, so that only the degree decides, and latency at small
batches. What is computed here counts the attention's FLOPs and every hop's latency as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from stepscope.analysis.rehearsal.cluster import Cluster
from stepscope.errors import UsageError
from stepscope.model import cost
from stepscope.model.config import ModelConfig

MOST_SEQUENCES = 2.0**30
_SOLVED = 1e-4


class ParallelStrategy(NamedTuple):
    """One way to divide the model; a batch is the sequences that its unit works on together."""

    name: str
    unit: str
    """Who shares a batch: a rank, or a group of ranks."""
    formula: str
    compute_ms: float
    """A sequence's compute on one rank that communication can hide behind."""
    communication_ms: Callable[[float], float]
    """Of a step with that batch."""

    def ratio(self, batch: float) -> float:
        """Communication as a multiple of the compute it can hide behind."""
        return self.communication_ms(batch) / (batch * self.compute_ms)

    @property
    def bound_below(self) -> float | None:
        """The batch below which it is communication-bound; None if it is at every batch.

        Communication for each sequence falls as the batch grows, so one batch parts the two.
        """
        if self.communication_ms(1.0) == 0.0:
            return 0.0
        high = 1.0
        while self.ratio(high) > 1.0:
            high *= 2
            if high > MOST_SEQUENCES:
                return None
        low = high / 2
        while self.ratio(low) <= 1.0 and low > 1.0 / MOST_SEQUENCES:
            low, high = low / 2, low
        while high / low > 1 + _SOLVED:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.ratio(middle) > 1.0 else (low, middle)
        return high


def parallel_strategies(
    model: ModelConfig,
    cluster: Cluster,
    flops_per_s: float,
    gradient_bytes: int,
    activation_bytes: int,
    tensor: int,
) -> tuple[ParallelStrategy, ...]:
    """`tensor` is the degree of tensor parallelism inside of the 2-D way.

    Tensor parallelism alone takes as many ranks as it can: a rank has one attention head at least.
    """
    if not flops_per_s > 0:
        raise UsageError(f"the device's rate is {flops_per_s:g} FLOP/s", "it must be above 0")
    ranks = cluster.ranks
    if tensor < 1 or ranks % tensor:
        raise UsageError(
            f"{ranks} ranks cannot be divided into groups of {tensor}",
            "choose a degree of tensor parallelism that divides the ranks",
        )
    if model.n_heads % tensor:
        raise UsageError(
            f"{model.n_heads} attention heads cannot be divided among {tensor} ranks",
            "choose a degree of tensor parallelism that divides the heads",
        )
    flops = cost.flops(model, 1, model.context)
    per_ms = flops_per_s / 1e3
    whole = cost.parameters(model).total * gradient_bytes
    groups = _groups(cluster, tensor)

    def exchange(within: Cluster) -> Callable[[float], float]:
        size = model.context * model.d_model * activation_bytes
        return lambda batch: 4 * model.n_layers * within.time("all-reduce", batch * size)

    def sharded(among: Cluster, size: float) -> float:
        return 2 * among.time("all-gather", size) + among.time("reduce-scatter", size)

    most = largest_tensor(model, ranks, ranks)
    exchange_most, exchange_group = exchange(cluster._replace(ranks=most)), exchange(groups.inner)
    reduction, gathers = cluster.time("all-reduce", whole), sharded(cluster, whole)
    divided = sharded(groups.outer, whole / tensor)
    return (
        ParallelStrategy("data", "a rank", "2(N-1)/N·g·P/B ≤ 4·P·tokens/F", flops.backward / per_ms,
            lambda _: reduction),
        ParallelStrategy("FSDP", "a rank", "3(N-1)/N·g·P/B ≤ 6·P·tokens/F", flops.step / per_ms,
            lambda _: gathers),
        ParallelStrategy(f"tensor {most}", f"{most} ranks",
            "8·L·(N-1)/N·a·d·tokens/B ≤ 6·P·tokens/(N·F)", flops.step / most / per_ms,
            exchange_most),
        ParallelStrategy(f"2-D: tensor {tensor} × FSDP {ranks // tensor}", f"{tensor} ranks",
            "tensor's + 3·g·(P/T)/B ≤ 6·P·tokens/(T·F)", flops.step / tensor / per_ms,
            lambda batch: exchange_group(batch) + divided),
    )  # fmt: skip


def largest_tensor(model: ModelConfig, ranks: int, most: int) -> int:
    """The largest degree up to `most` that divides both the ranks and the attention heads."""
    both = math.gcd(ranks, model.n_heads)
    return max(degree for degree in range(1, min(most, both) + 1) if both % degree == 0)


class _Groups(NamedTuple):
    inner: Cluster
    outer: Cluster


def _groups(cluster: Cluster, tensor: int) -> _Groups:
    """Ranks of a tensor group sit next to each other; counterparts of the groups exchange."""
    inner = cluster._replace(ranks=tensor)
    left = max(1, cluster.per_node // tensor)
    return _Groups(inner, cluster._replace(ranks=cluster.ranks // tensor, per_node=left))
