"""Matmuls of a training step by shape, with fused or with separate projections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from stepscope.kernels.loss_chunks import rows_per_chunk
from stepscope.model.config import ModelConfig

Way = Literal["forward", "towards the input", "towards the weight"]
HEAD = "head"


class Group(NamedTuple):
    """Weights of a block that one matmul reads together."""

    name: str
    reads: str
    """Name of the input; groups with the same name share it."""
    out: int
    into: int


class Matmul(NamedTuple):
    """One shape of matmul in one direction of a training step."""

    name: str
    way: Way
    rows: int
    columns: int
    depth: int
    """Reduction dimension: each element of the rows × columns result sums this many terms."""
    instances: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.depth * self.instances


def block_groups(config: ModelConfig, *, fused_projections: bool) -> tuple[Group, ...]:
    """Weight groups of a block, in the order of the forward pass."""
    d, hidden = config.d_model, config.d_ff
    first, second = "attention norm", "feed-forward norm"
    projections = (
        (Group("q, k, v", first, 3 * d, d),)
        if fused_projections
        else tuple(Group(name, first, d, d) for name in ("q", "k", "v"))
    )
    gates = (
        (Group("gate, up", second, 2 * hidden, d),)
        if fused_projections
        else tuple(Group(name, second, hidden, d) for name in ("gate", "up"))
    )
    return (
        *projections,
        Group("output", "heads", d, d),
        *gates,
        Group("down", "gated", d, hidden),
    )


def head_chunks(config: ModelConfig, tokens: int, *, fused_projections: bool) -> tuple[int, ...]:
    """Rows of each matmul of the head; chunked if the loss is fused."""
    rows = rows_per_chunk(tokens, config.vocab, config.d_model) if fused_projections else tokens
    return tuple(min(rows, tokens - start) for start in range(0, tokens, rows))


def step_matmuls(
    config: ModelConfig, tokens: int, *, fused_projections: bool
) -> tuple[Matmul, ...]:
    """All matmuls of a step; those of a block once per shape, with the number of blocks."""
    blocks = [
        matmul
        for group in block_groups(config, fused_projections=fused_projections)
        for matmul in _three(group.name, tokens, group.out, group.into, config.n_layers)
    ]
    head = [
        matmul
        for rows in head_chunks(config, tokens, fused_projections=fused_projections)
        for matmul in _three(HEAD, rows, config.vocab, config.d_model, 1)
    ]
    return (*blocks, *head)


def _three(name: str, tokens: int, out: int, into: int, instances: int) -> Iterator[Matmul]:
    """Yield the forward matmul and those of the gradients of the input and of the weight."""
    yield Matmul(name, "forward", tokens, out, into, instances)
    yield Matmul(name, "towards the input", tokens, into, out, instances)
    yield Matmul(name, "towards the weight", out, into, tokens, instances)
