"""Brute-force simulation of parallel training: ranks with arrays, links that count bytes, and
matmuls that count FLOPs. Nothing here knows a formula; the results are compared with one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ELEMENT = 2
"""Bytes of an element on a link and of a saved activation: 16 bits."""


class Network:
    """Counts what each rank sends, and the time of steps in which all ranks send at once."""

    def __init__(self, ranks: int, bandwidth: float) -> None:
        self.sent = [0] * ranks
        self.seconds = 0.0
        self.steps = 0
        self._bandwidth = bandwidth

    def step(self, elements: dict[int, int]) -> None:
        """Every rank sends its number of elements; the step ends with the slowest."""
        for rank, count in elements.items():
            self.sent[rank] += count * ELEMENT
        self.seconds += max(elements.values(), default=0) * ELEMENT / self._bandwidth
        self.steps += 1


def ring_all_gather(network: Network, chunks: Sequence[Array]) -> list[Array]:
    """Return the concatenation on every rank."""
    ranks = len(chunks)
    have: list[dict[int, Array]] = [{rank: chunks[rank]} for rank in range(ranks)]
    for step in range(ranks - 1):
        moved = {rank: (rank - step) % ranks for rank in range(ranks)}
        network.step({rank: have[rank][chunk].size for rank, chunk in moved.items()})
        received = {(rank + 1) % ranks: (chunk, have[rank][chunk]) for rank, chunk in moved.items()}
        for rank, (chunk, values) in received.items():
            have[rank][chunk] = values
    return [np.concatenate([mine[chunk] for chunk in range(ranks)]) for mine in have]


def ring_reduce_scatter(network: Network, tensors: Sequence[Array]) -> list[Array]:
    """Return chunk i of the sum on rank i."""
    ranks = len(tensors)
    partial = [np.split(tensor.astype(float), ranks) for tensor in tensors]
    for step in range(1, ranks):
        moved = {rank: (rank - step) % ranks for rank in range(ranks)}
        network.step({rank: partial[rank][chunk].size for rank, chunk in moved.items()})
        received = {
            (rank + 1) % ranks: (chunk, partial[rank][chunk].copy())
            for rank, chunk in moved.items()
        }
        for rank, (chunk, values) in received.items():
            partial[rank][chunk] = partial[rank][chunk] + values
    return [partial[rank][rank] for rank in range(ranks)]


def ring_all_reduce(network: Network, tensors: Sequence[Array]) -> list[Array]:
    return ring_all_gather(network, ring_reduce_scatter(network, tensors))


def alternate_all_reduce(network: Network, tensors: Sequence[Array]) -> list[Array]:
    """Full tensors travel around the ring, and every rank adds what it receives."""
    ranks = len(tensors)
    total, travelling = [tensor.copy() for tensor in tensors], list(tensors)
    for _ in range(ranks - 1):
        network.step({rank: travelling[rank].size for rank in range(ranks)})
        travelling = [travelling[rank - 1] for rank in range(ranks)]
        total = [mine + got for mine, got in zip(total, travelling, strict=True)]
    return total


class Layer(NamedTuple):
    """Weights, or their gradients."""

    w1: Array
    w2: Array
    w3: Array


class Rank:
    """A device: counts the FLOPs of its matmuls and the bytes that it saves for backward."""

    def __init__(self) -> None:
        self.flops = 0
        self.saved = 0

    def matmul(self, a: Array, b: Array) -> Array:
        self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return np.asarray(a @ b)

    def forward(self, x: Array, layer: Layer) -> tuple[Array, tuple[Array, ...]]:
        x1, x2 = self.matmul(x, layer.w1), self.matmul(x, layer.w2)
        z = np.tanh(x1) * x2
        self.saved += ELEMENT * sum(array.size for array in (x, x1, x2, z))
        return self.matmul(z, layer.w3), (x, x1, x2, z)

    def backward(self, dy: Array, saved: tuple[Array, ...], layer: Layer) -> tuple[Array, Layer]:
        x, x1, x2, z = saved
        dz = self.matmul(dy, layer.w3.T)
        dx2, dx1 = dz * np.tanh(x1), dz * (1 - np.tanh(x1) ** 2) * x2
        dx = self.matmul(dx1, layer.w1.T) + self.matmul(dx2, layer.w2.T)
        gradients = (self.matmul(x.T, dx1), self.matmul(x.T, dx2), self.matmul(z.T, dy))
        return dx, Layer(*gradients)


class Run(NamedTuple):
    """What a simulated pass did, and the results of both passes over all ranks."""

    ranks: list[Rank]
    networks: dict[str, list[Network]]
    """Networks by axis: one for each group of ranks."""
    y: Array
    dx: Array
    gradients: Layer


class Mesh(NamedTuple):
    """FSDP or data-parallel ranks (`data`) times tensor-parallel ranks."""

    data: int
    tensor: int
    bandwidth: float

    def networks(self) -> dict[str, list[Network]]:
        return {
            "data": [Network(self.data, self.bandwidth) for _ in range(self.tensor)],
            "tensor": [Network(self.tensor, self.bandwidth) for _ in range(self.data)],
        }


def train(x: Array, dy: Array, layer: Layer, mesh: Mesh, *, sharded: bool) -> dict[str, Run]:
    """Run both passes on a mesh; `sharded`: the data axis shards the weights (FSDP)."""
    rows, gradient_rows = np.split(x, mesh.data), np.split(dy, mesh.data)
    shards = [
        Layer(*parts)
        for parts in zip(
            np.split(layer.w1, mesh.tensor, axis=1),
            np.split(layer.w2, mesh.tensor, axis=1),
            np.split(layer.w3, mesh.tensor, axis=0),
            strict=True,
        )
    ]
    grid = [(i, j) for i in range(mesh.tensor) for j in range(mesh.data)]
    saved, outputs = {}, {}
    first, first_networks = {at: Rank() for at in grid}, mesh.networks()
    weights = _gathered(shards, mesh, first_networks) if sharded else shards
    for i, j in grid:
        outputs[i, j], saved[i, j] = first[i, j].forward(rows[j], weights[i])
    y = np.concatenate([_reduced(outputs, j, mesh, first_networks) for j in range(mesh.data)])

    ranks, networks = {at: Rank() for at in grid}, mesh.networks()
    weights = _gathered(shards, mesh, networks) if sharded else shards
    inputs: dict[tuple[int, int], Array] = {}
    gradients: dict[tuple[int, int], Layer] = {}
    for i, j in grid:
        inputs[i, j], gradients[i, j] = ranks[i, j].backward(
            gradient_rows[j], saved[i, j], weights[i]
        )
    dx = np.concatenate([_reduced(inputs, j, mesh, networks) for j in range(mesh.data)])
    summed = [_averaged(gradients, i, mesh, networks, sharded) for i in range(mesh.tensor)]
    total = Layer(
        np.concatenate([one.w1 for one in summed], axis=1),
        np.concatenate([one.w2 for one in summed], axis=1),
        np.concatenate([one.w3 for one in summed], axis=0),
    )
    return {
        "forward": Run(list(first.values()), first_networks, y, dx, total),
        "backward": Run(list(ranks.values()), networks, y, dx, total),
    }


def _gathered(
    shards: Sequence[Layer], mesh: Mesh, networks: dict[str, list[Network]]
) -> list[Layer]:
    """All-gather every weight from flat shards; each rank of the data axis gets the same."""
    return [
        Layer(
            *(
                ring_all_gather(networks["data"][i], np.split(weight.ravel(), mesh.data))[
                    -1
                ].reshape(weight.shape)
                for weight in shards[i]
            )
        )
        for i in range(mesh.tensor)
    ]


def _reduced(
    arrays: dict[tuple[int, int], Array], j: int, mesh: Mesh, networks: dict[str, list[Network]]
) -> Array:
    flat = [arrays[i, j].ravel() for i in range(mesh.tensor)]
    return ring_all_reduce(networks["tensor"][j], flat)[-1].reshape(arrays[0, j].shape)


def _averaged(
    gradients: dict[tuple[int, int], Layer],
    i: int,
    mesh: Mesh,
    networks: dict[str, list[Network]],
    sharded: bool,
) -> Layer:
    network, summed = networks["data"][i], []
    for name in Layer._fields:
        arrays = [getattr(gradients[i, j], name) for j in range(mesh.data)]
        flat = [array.ravel() for array in arrays]
        if sharded:
            values = np.concatenate(ring_reduce_scatter(network, flat))
        else:
            values = ring_all_reduce(network, flat)[0]
        summed.append(values.reshape(arrays[0].shape))
    return Layer(*summed)


class Pipeline(NamedTuple):
    seconds: float
    idle: float
    """Largest idle share of a stage."""
    in_flight: int
    """Most microbatches whose activations the first stage stores at once."""


def pipeline(
    stages: int, microbatches: int, fwd: float, bwd: float, *, one_f_one_b: bool
) -> Pipeline:
    """Run the tasks of every stage in its order, each as soon as its input has arrived."""
    orders = [_order(stage, stages, microbatches, one_f_one_b) for stage in range(stages)]
    done: dict[tuple[str, int, int], float] = {}
    free, at, busy = [0.0] * stages, [0] * stages, [0.0] * stages
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            if at[stage] == len(orders[stage]):
                continue
            kind, micro = orders[stage][at[stage]]
            before = (
                (kind, stage - 1, micro)
                if kind == "forward"
                else (kind, stage + 1, micro)
                if stage + 1 < stages
                else ("forward", stage, micro)
            )
            if before[1] >= 0 and before not in done:
                continue
            length = fwd if kind == "forward" else bwd
            start = max(free[stage], done.get(before, 0.0))
            done[kind, stage, micro] = free[stage] = start + length
            busy[stage] += length
            at[stage] += 1
    stored = most = 0
    for kind, _ in orders[0]:
        stored += 1 if kind == "forward" else -1
        most = max(most, stored)
    end = max(free)
    return Pipeline(end, max(1 - one / end for one in busy), most)


def _order(stage: int, stages: int, microbatches: int, one_f_one_b: bool) -> list[tuple[str, int]]:
    ahead = min(stages - stage, microbatches) if one_f_one_b else microbatches
    order = [("forward", micro) for micro in range(ahead)]
    for micro in range(microbatches):
        order.append(("backward", micro))
        if ahead + micro < microbatches:
            order.append(("forward", ahead + micro))
    return order


def bucketed_overhead(buckets: int, compute: float, communication: float, overhead: float) -> float:
    """Time after the backward pass until the last of the buckets is reduced."""
    ready = link = 0.0
    for _ in range(buckets):
        ready += compute
        link = max(link, ready) + overhead + communication
    return link - ready
