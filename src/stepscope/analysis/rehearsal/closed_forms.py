"""Communication against compute in closed form, for four strategies to parallelize a model.

A strategy is communication-bound if its communication takes longer than the compute that it can
overlap with. With P parameters, g bytes a gradient or weight, a bytes an activation, F FLOP/s of a
rank, B bytes/s of its link, L layers of width d:

    data      2(N-1)/N·g·P/B against the backward pass, 4·P·tokens/F
    FSDP      3(N-1)/N·g·P/B against forward and backward, 6·P·tokens/F
    tensor    4·L all-reduces of a·d·tokens, 8·L·(N-1)/N·a·d·tokens/B, against 6·P·tokens/(N·F)
    2-D       tensor inside groups of T ranks, FSDP of P/T parameters among N/T groups

The first two are hidden above a number of tokens: g·F/(2B)·(N-1)/N for both. For tensor parallelism
both sides grow with the tokens, so that only the degree decides, and latency at small batches. The
code also counts the attention's FLOPs and every hop's latency.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from stepscope.analysis.rehearsal.cluster import Cluster
from stepscope.errors import UsageError
from stepscope.model import cost
from stepscope.model.config import ModelConfig

MAX_SEQUENCES = 2.0**30
_SOLVED = 1e-4


class ParallelStrategy(NamedTuple):
    """One parallelization; a batch is the sequences that its unit processes together."""

    name: str
    unit: str
    """Unit that shares a batch: a rank, or a group of ranks."""
    formula: str
    compute_ms: float
    """Compute of a sequence on one rank that communication can overlap with."""
    communication_ms: Callable[[float], float]
    """Communication of a step with that batch."""

    def ratio(self, batch: float) -> float:
        """Communication as a multiple of the compute it can overlap with."""
        return self.communication_ms(batch) / (batch * self.compute_ms)

    @property
    def bound_below(self) -> float | None:
        """Batch below which it is communication-bound; None if it is at every batch.

        Communication per sequence falls as the batch grows, so there is one threshold.
        """
        if self.communication_ms(1.0) == 0.0:
            return 0.0
        high = 1.0
        while self.ratio(high) > 1.0:
            high *= 2
            if high > MAX_SEQUENCES:
                return None
        low = high / 2
        while self.ratio(low) <= 1.0 and low > 1.0 / MAX_SEQUENCES:
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
    """Return the strategies; `tensor` is the degree of tensor parallelism in the 2-D one.

    Tensor parallelism alone uses as many ranks as possible: each rank has at least one attention
    head.
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
    total = cost.parameters(model).total * gradient_bytes
    groups = _groups(cluster, tensor)

    def exchange(within: Cluster) -> Callable[[float], float]:
        size = model.context * model.d_model * activation_bytes
        return lambda batch: 4 * model.n_layers * within.time("all-reduce", batch * size)

    def sharded(among: Cluster, size: float) -> float:
        return 2 * among.time("all-gather", size) + among.time("reduce-scatter", size)

    most = largest_tensor(model, ranks, ranks)
    exchange_most, exchange_group = exchange(cluster._replace(ranks=most)), exchange(groups.inner)
    reduction, gathers = cluster.time("all-reduce", total), sharded(cluster, total)
    divided = sharded(groups.outer, total / tensor)
    return (
        ParallelStrategy(
            "data",
            "a rank",
            "2(N-1)/N·g·P/B ≤ 4·P·tokens/F",
            flops.backward / per_ms,
            lambda _: reduction,
        ),
        ParallelStrategy(
            "FSDP",
            "a rank",
            "3(N-1)/N·g·P/B ≤ 6·P·tokens/F",
            flops.step / per_ms,
            lambda _: gathers,
        ),
        ParallelStrategy(
            f"tensor {most}",
            f"{most} ranks",
            "8·L·(N-1)/N·a·d·tokens/B ≤ 6·P·tokens/(N·F)",
            flops.step / most / per_ms,
            exchange_most,
        ),
        ParallelStrategy(
            f"2-D: tensor {tensor} × FSDP {ranks // tensor}",
            f"{tensor} ranks",
            "tensor's + 3·g·(P/T)/B ≤ 6·P·tokens/(T·F)",
            flops.step / tensor / per_ms,
            lambda batch: exchange_group(batch) + divided,
        ),
    )


def largest_tensor(model: ModelConfig, ranks: int, most: int) -> int:
    """Return the largest degree up to `most` that divides both the ranks and the heads."""
    both = math.gcd(ranks, model.n_heads)
    return max(degree for degree in range(1, min(most, both) + 1) if both % degree == 0)


class _Groups(NamedTuple):
    inner: Cluster
    outer: Cluster


def _groups(cluster: Cluster, tensor: int) -> _Groups:
    """Ranks of a tensor group are adjacent; corresponding ranks of the groups communicate."""
    inner = cluster._replace(ranks=tensor)
    left = max(1, cluster.per_node // tensor)
    return _Groups(inner, cluster._replace(ranks=cluster.ranks // tensor, per_node=left))
