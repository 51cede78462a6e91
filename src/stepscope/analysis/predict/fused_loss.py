"""Head and loss by chunks of rows, in sizes: what `model.kernels.linear_cross_entropy` holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.analysis.predict.fused_layers import FusedProjectionLayers
from stepscope.analysis.predict.memory import Buffer
from stepscope.analysis.predict.operators import FLOAT32
from stepscope.analysis.predict.tape import Value
from stepscope.kernels.loss_chunks import padded_columns, rows_per_chunk
from stepscope.records.memory import LOGITS

if TYPE_CHECKING:
    from stepscope.analysis.predict.step import Play


def fused_loss(play: Play, x: Value) -> Value:
    """The loss; gradients of x and of the head are made on the way and kept for the backward."""
    new, head, model = play.memory.buffer, play.head, play.plan.model
    tokens, vocab, d = play.shape.tokens, model.vocab, model.d_model
    compute = play.ops.autocast or max(x.width, head.width)
    wide = max(FLOAT32, compute)
    narrow: list[Buffer] = []
    if isinstance(play.layers, FusedProjectionLayers):
        play.layers.narrow([head])
    elif head.width != compute:
        narrow.append(new(vocab * d * compute))
    grad_x = new(tokens * d * compute)
    losses = new(tokens * wide)
    counted = new(wide), new(wide)
    loss, grad_weight = _chunks(play, narrow, x.width != compute, compute, wide)
    del losses, counted
    x_width, head_width = x.width, head.width

    def rule(_: Buffer) -> tuple[Buffer, Buffer]:
        # Scaled where they are, unless the format changes.
        towards_x = grad_x if x_width == compute else new(tokens * d * x_width)
        same = head_width == wide
        return towards_x, grad_weight if same else new(vocab * d * head_width)

    with play.tape.inside("loss"):
        return play.tape.operator(
            "gradients", loss, 1, wide, (x, head), rule, (grad_x, grad_weight)
        )


def _chunks(
    play: Play, narrow: list[Buffer], casts: bool, compute: int, wide: int
) -> tuple[Buffer, Buffer]:
    """The loop over rows: the loss and the gradient of the weight. Logits lie where those of the
    last chunk did; the weight's cast goes before the last product."""
    new, model = play.memory.buffer, play.plan.model
    tokens, vocab, d = play.shape.tokens, model.vocab, model.d_model
    rows = min(tokens, rows_per_chunk(tokens, vocab, d))
    logits = new(rows * padded_columns(vocab) * compute, LOGITS)
    grad_weight = read = None
    for start in range(0, tokens, rows):
        own = min(rows, tokens - start)
        read = new(own * d * compute) if casts else None
        if not play.plan.has_kernels:
            # Logits in float32, less their log-sum-exp, as probabilities.
            widened = new(own * vocab * wide) if wide != compute else None
            shifted = new(own * vocab * wide)
            probabilities = new(own * vocab * wide)
            del widened, shifted, probabilities
        if start + rows >= tokens:
            narrow.clear()
        # cuBLAS writes and adds to a wider format than it reads.
        widens = wide != compute and play.plan.device == "cpu"
        if grad_weight is not None:
            added = new(vocab * d * compute) if widens else None
            del added
            continue
        copies = (new(own * vocab * wide), new(own * d * wide)) if widens else ()
        grad_weight = new(vocab * d * wide)
        del copies
    assert grad_weight is not None
    loss = new(wide)
    del read, logits
    return loss, grad_weight
