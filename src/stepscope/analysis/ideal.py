"""Operations of one training step with the minimum FLOPs and memory traffic of each.

Each matmul reads its two inputs and writes its output once, in the compute dtype. The work between
matmuls counts as one pass each: residual add with norm, SwiGLU, rotary embedding, loss, optimizer.
The backward pass of attention counts five matmuls where the forward pass has two, because the
scores are not stored and are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from stepscope.attention import cost as attention_cost
from stepscope.attention.cost import AttentionShape
from stepscope.model.config import WIDTHS, ModelConfig, Precision
from stepscope.model.cost import parameters

Kind = Literal["matmul", "attention", "memory", "optimizer"]
FP8_OPERATIONS = ("attention projections", "feed-forward")
"""Matmuls that FP8 applies to: the linear layers of the blocks, not the head."""
_FLOAT32 = 4
_PHASES = {
    "forward": ("forward",),
    "forward-backward": ("forward", "backward"),
    "train-step": ("forward", "backward", "optimizer"),
}


class Operation(NamedTuple):
    """All instances of one kind of operation in a step."""

    name: str
    kind: Kind
    phase: str
    instances: int
    flops: int
    """FLOPs of one instance."""
    bytes: int

    def ms(self, rate: float, bandwidth: float) -> float:
        """Time of all instances, each bound by compute or by bandwidth."""
        return self.instances * max(self.flops / rate, self.bytes / bandwidth) * 1e3


def operations(
    config: ModelConfig, batch: int, context: int, precision: Precision, mode: str = "train-step"
) -> tuple[Operation, ...]:
    tokens = batch * context
    every = (
        *_matmuls(config, tokens, WIDTHS[precision.compute]),
        *_attention(config, batch, context, WIDTHS[precision.compute]),
        *_passes(config, tokens, precision),
        _optimizer(config, precision),
    )
    return tuple(operation for operation in every if operation.phase in _PHASES[mode])


class Rates(NamedTuple):
    """Measured rates of a machine for one step."""

    matmul: float
    """FLOP/s in the dtype of the matmuls."""
    bandwidth: float
    """B/s."""
    fp8: float | None = None
    """FLOP/s of the matmuls that FP8 applies to; None where they stay in the dtype of the others.
    """

    def ms(self, operation: Operation) -> float:
        """Ideal time of an operation."""
        narrow = self.fp8 if operation.name in FP8_OPERATIONS else None
        return operation.ms(narrow or self.matmul, self.bandwidth)


def ideal_ms(listed: tuple[Operation, ...], rates: Rates) -> dict[Kind, float]:
    """Sum the ideal times by kind; the step's ideal time is the sum of all kinds."""
    totals: dict[Kind, float] = {"matmul": 0.0, "attention": 0.0, "memory": 0.0, "optimizer": 0.0}
    for operation in listed:
        totals[operation.kind] += rates.ms(operation)
    return totals


def _matmuls(config: ModelConfig, tokens: int, width: int) -> Iterator[Operation]:
    d, hidden = config.d_model, config.d_ff
    shapes = {
        "attention projections": (4 * config.n_layers, d, d),
        "feed-forward": (3 * config.n_layers, d, hidden),
        "head": (1, d, config.vocab),
    }
    for name, (count, a, b) in shapes.items():
        flops, moved = 2 * tokens * a * b, width * (tokens * a + a * b + tokens * b)
        yield Operation(name, "matmul", "forward", count, flops, moved)
        # Gradients of the input and of the weight.
        yield Operation(name, "matmul", "backward", 2 * count, flops, moved)


def _attention(config: ModelConfig, batch: int, context: int, width: int) -> Iterator[Operation]:
    shape = AttentionShape(
        batch=batch, heads=config.n_heads, seq_q=context, seq_k=context, d_head=config.d_head
    )
    yield Operation(
        "attention",
        "attention",
        "forward",
        config.n_layers,
        attention_cost.forward_flops(shape, causal=True),
        attention_cost.forward_bytes(shape, width),
    )
    yield Operation(
        "attention",
        "attention",
        "backward",
        config.n_layers,
        attention_cost.kernel_backward_flops(shape, causal=True),
        attention_cost.backward_bytes(shape, width),
    )


def _passes(config: ModelConfig, tokens: int, precision: Precision) -> Iterator[Operation]:
    """Operations that only move bytes."""
    widths = (precision.compute, precision.stream, precision.weights)
    compute, stream, learned = (WIDTHS[kind] for kind in widths)
    layers, row = config.n_layers, tokens * config.d_model
    hidden, logits = tokens * config.d_ff, tokens * config.vocab
    table = config.vocab * config.d_model * learned
    # A branch's gradient is a separate tensor if the branch has another dtype.
    branch = compute if compute != stream else 0
    for name, count, forward, backward in (
        ("embedding", 1, row * (learned + stream), row * stream + table),
        ("first norm", 1, row * (stream + compute), row * (3 * stream + compute)),
        (
            "norm and sum",
            2 * layers,
            2 * row * (stream + compute),
            row * (3 * stream + compute + branch),
        ),
        ("rotation", 2 * layers, 2 * row * compute, 2 * row * compute),
        ("SwiGLU", layers, 3 * hidden * compute, 5 * hidden * compute),
        ("loss", 1, logits * compute, logits * compute),
    ):
        yield Operation(name, "memory", "forward", count, 0, forward)
        yield Operation(name, "memory", "backward", count, 0, backward)


def _optimizer(config: ModelConfig, precision: Precision) -> Operation:
    """AdamW reads a gradient, and reads and writes a weight and two moments. With master weights
    everything but the gradient is float32, and the model's weight is written as well."""
    width = WIDTHS[precision.weights]
    each = width + 6 * width
    if precision.master:
        each = width + 6 * _FLOAT32 + width
    return Operation("AdamW", "optimizer", "optimizer", 1, 0, parameters(config).total * each)
