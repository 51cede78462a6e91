"""The operations of one training step with the least arithmetic and traffic that each needs.

Each matrix product reads its two factors and writes its result once, in the format of the products.
What stands between them is taken as one pass: norm with the sum before it, SwiGLU, rotation, loss,
optimizer. The backward of attention counts five products where the forward has two, because scores
that were never stored are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from stepscope.attention import cost as attention_cost
from stepscope.attention.cost import AttentionShape
from stepscope.model.config import ModelConfig, Precision
from stepscope.model.cost import parameters

Kind = Literal["matmul", "attention", "memory", "optimizer"]
_WIDTHS = {"float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2}
_FLOAT32 = 4
_PHASES = {
    "forward": ("forward",),
    "forward-backward": ("forward", "backward"),
    "train-step": ("forward", "backward", "optimizer"),
}


class Operation(NamedTuple):
    """One kind of operation in a step, all its instances together."""

    name: str
    kind: Kind
    phase: str
    instances: int
    flops: int
    """Of one instance."""
    bytes: int

    def ms(self, rate: float, bandwidth: float) -> float:
        """All instances, each limited by what it needs more of."""
        return self.instances * max(self.flops / rate, self.bytes / bandwidth) * 1e3


def operations(
    config: ModelConfig, batch: int, context: int, form: Precision, mode: str = "train-step"
) -> tuple[Operation, ...]:
    tokens = batch * context
    every = (
        *_products(config, tokens, _WIDTHS[form.compute]),
        *_attention(config, batch, context, _WIDTHS[form.compute]),
        *_passes(config, tokens, form),
        _optimizer(config, form),
    )
    return tuple(one for one in every if one.phase in _PHASES[mode])


def ideal_ms(listed: tuple[Operation, ...], rate: float, bandwidth: float) -> dict[Kind, float]:
    """By kind; the step's ideal time is their sum."""
    held: dict[Kind, float] = {"matmul": 0.0, "attention": 0.0, "memory": 0.0, "optimizer": 0.0}
    for one in listed:
        held[one.kind] += one.ms(rate, bandwidth)
    return held


def _products(config: ModelConfig, tokens: int, width: int) -> Iterator[Operation]:
    d, hidden = config.d_model, config.d_ff
    shapes = {
        "attention projections": (4 * config.n_layers, d, d),
        "feed-forward": (3 * config.n_layers, d, hidden),
        "head": (1, d, config.vocab),
    }
    for name, (count, a, b) in shapes.items():
        flops, moved = 2 * tokens * a * b, width * (tokens * a + a * b + tokens * b)
        yield Operation(name, "matmul", "forward", count, flops, moved)
        # Towards the input and towards the weight.
        yield Operation(name, "matmul", "backward", 2 * count, flops, moved)


def _attention(config: ModelConfig, batch: int, context: int, width: int) -> Iterator[Operation]:
    shape = AttentionShape(
        batch=batch, heads=config.n_heads, seq_q=context, seq_k=context, d_head=config.d_head
    )
    yield Operation(
        "attention", "attention", "forward", config.n_layers,
        attention_cost.forward_flops(shape, causal=True),
        attention_cost.forward_bytes(shape, width),
    )  # fmt: skip
    yield Operation(
        "attention", "attention", "backward", config.n_layers,
        attention_cost.kernel_backward_flops(shape, causal=True),
        attention_cost.backward_bytes(shape, width),
    )  # fmt: skip


def _passes(config: ModelConfig, tokens: int, form: Precision) -> Iterator[Operation]:
    """What only moves bytes."""
    product, stream, learned = (_WIDTHS[kind] for kind in (form.compute, form.stream, form.weights))
    layers, row = config.n_layers, tokens * config.d_model
    hidden, logits = tokens * config.d_ff, tokens * config.vocab
    table = config.vocab * config.d_model * learned
    # A branch's gradient is a tensor of its own where the branch has another format.
    branch = product if product != stream else 0
    for name, count, forward, backward in (
        ("embedding", 1, row * (learned + stream), row * stream + table),
        ("first norm", 1, row * (stream + product), row * (3 * stream + product)),
        (
            "norm and sum", 2 * layers, 2 * row * (stream + product),
            row * (3 * stream + product + branch),
        ),
        ("rotation", 2 * layers, 2 * row * product, 2 * row * product),
        ("SwiGLU", layers, 3 * hidden * product, 5 * hidden * product),
        ("loss", 1, logits * product, logits * product),
    ):  # fmt: skip
        yield Operation(name, "memory", "forward", count, 0, forward)
        yield Operation(name, "memory", "backward", count, 0, backward)


def _optimizer(config: ModelConfig, form: Precision) -> Operation:
    """AdamW reads a gradient, and reads and writes a weight and two moments. With master weights
    all but the gradient is in float32, and the model's weight is written too."""
    width = _WIDTHS[form.weights]
    each = width + 6 * width
    if form.master:
        each = width + 6 * _FLOAT32 + width
    return Operation("AdamW", "optimizer", "optimizer", 1, 0, parameters(config).total * each)
