"""Memory of head and loss in chunks of rows, as `kernels.linear_cross_entropy` allocates it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.analysis.predict.fused_layers import FusedProjectionLayers
from stepscope.analysis.predict.memory import Buffer
from stepscope.analysis.predict.operators import FLOAT32
from stepscope.analysis.predict.tape import Value
from stepscope.kernels.loss_chunks import matmul_columns, padded_columns, rows_per_chunk
from stepscope.records.memory import LOGITS

if TYPE_CHECKING:
    from stepscope.analysis.predict.step import StepSimulation


def fused_loss(simulation: StepSimulation, x: Value) -> Value:
    """Return the loss; gradients of x and of the head are computed with it and saved."""
    new, head, model = simulation.memory.buffer, simulation.head, simulation.plan.model
    tokens, vocab, d = simulation.shape.tokens, model.vocab, model.d_model
    compute = simulation.ops.autocast or max(x.width, head.width)
    wide = max(FLOAT32, compute)
    narrow: list[Buffer] = []
    columns = matmul_columns(vocab)
    if isinstance(simulation.layers, FusedProjectionLayers) and head.width != compute:
        simulation.layers.narrow([head], padding=(columns - vocab) * d)
    elif head.width != compute or columns != vocab:
        narrow.append(new(columns * d * compute))
    grad_x = new(tokens * d * compute)
    losses = new(tokens * wide)
    counted = new(wide), new(wide)
    loss, grad_weight = _chunks(simulation, narrow, x.width != compute, compute, wide)
    del losses, counted
    x_width, head_width = x.width, head.width

    def rule(_: Buffer) -> tuple[Buffer, Buffer]:
        # Scaled in place, unless the dtype changes.
        towards_x = grad_x if x_width == compute else new(tokens * d * x_width)
        same = head_width == wide
        return towards_x, grad_weight if same else new(vocab * d * head_width)

    with simulation.tape.inside("loss"):
        return simulation.tape.operator(
            "gradients", loss, 1, wide, (x, head), rule, (grad_x, grad_weight)
        )


def _chunks(
    simulation: StepSimulation, narrow: list[Buffer], casts: bool, compute: int, wide: int
) -> tuple[Buffer, Buffer]:
    """Loop over rows; return the loss and the gradient of the weight. All chunks share one buffer
    of logits; the cast weight is freed before the last matmul."""
    new, model = simulation.memory.buffer, simulation.plan.model
    tokens, vocab, d = simulation.shape.tokens, model.vocab, model.d_model
    rows, columns = min(tokens, rows_per_chunk(tokens, vocab, d)), matmul_columns(vocab)
    logits = new(rows * padded_columns(vocab) * compute, LOGITS)
    grad_weight = read = None
    for start in range(0, tokens, rows):
        own = min(rows, tokens - start)
        read = new(own * d * compute) if casts else None
        if not simulation.plan.has_kernels:
            # Logits in float32, minus their log-sum-exp, as probabilities.
            widened = new(own * vocab * wide) if wide != compute else None
            shifted = new(own * vocab * wide)
            probabilities = new(own * vocab * wide)
            del widened, shifted, probabilities
        if start + rows >= tokens:
            narrow.clear()
        # cuBLAS writes and accumulates in a wider dtype than it reads.
        widens = wide != compute and simulation.plan.device == "cpu"
        if grad_weight is not None:
            added = new(columns * d * compute) if widens else None
            del added
            continue
        copies = (new(own * columns * wide), new(own * d * wide)) if widens else ()
        grad_weight = new(columns * d * wide)
        del copies
    assert grad_weight is not None
    loss = new(wide)
    del read, logits
    return loss, grad_weight
