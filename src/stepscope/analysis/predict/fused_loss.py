"""Head and loss by chunks of rows, in sizes: what `model.kernels.linear_cross_entropy` holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.analysis.predict.fused_layers import JoinedLayers
from stepscope.analysis.predict.memory import Buffer
from stepscope.analysis.predict.operators import FLOAT32
from stepscope.analysis.predict.tape import Value
from stepscope.model.cost import rows_of_a_chunk
from stepscope.records.memory import LOGITS

if TYPE_CHECKING:
    from stepscope.analysis.predict.step import Play


def fused_loss(play: Play, x: Value) -> Value:
    """The loss; gradients of x and of the head are made on the way and kept for the backward."""
    new, head, model = play.memory.buffer, play.head, play.plan.model
    tokens, vocab, d = play.shape.tokens, model.vocab, model.d_model
    compute = play.ops.autocast or max(x.width, head.width)
    wide = max(FLOAT32, compute)
    if isinstance(play.layers, JoinedLayers):
        narrow = play.layers.narrow([head])
    else:
        narrow = (new(vocab * d * compute),) if head.width != compute else ()
    grad_x = new(tokens * d * compute)
    grad_weight = new(vocab * d * wide)
    losses = new(tokens * wide)
    _chunks(play, x.width != compute, compute, wide)
    del narrow, losses
    x_width, head_width = x.width, head.width

    def rule(_: Buffer) -> tuple[Buffer, Buffer]:
        # Scaled where they are, unless the format changes.
        towards_x = grad_x if x_width == compute else new(tokens * d * x_width)
        same = head_width == wide
        return towards_x, grad_weight if same else new(vocab * d * head_width)

    divisor = new(wide)
    with play.tape.inside("loss"):
        return play.tape.operator(
            "gradients", new(wide), 1, wide, (x, head), rule, (divisor, grad_x, grad_weight)
        )


def _chunks(play: Play, casts: bool, compute: int, wide: int) -> None:
    """The loop over rows; while a chunk's logits are made those of the last are still there."""
    new, model = play.memory.buffer, play.plan.model
    tokens, vocab, d = play.shape.tokens, model.vocab, model.d_model
    rows = min(tokens, rows_of_a_chunk(tokens, vocab, d))
    read = logits = None
    for start in range(0, tokens, rows):
        own = min(rows, tokens - start)
        read = new(own * d * compute) if casts else None
        logits = new(own * vocab * compute, LOGITS)
        if play.plan.has_kernels:
            new(own * FLOAT32)
        else:
            # Without the kernel: logits in float32, less their log-sum-exp, as probabilities.
            widened = new(own * vocab * wide) if wide != compute else None
            shifted = new(own * vocab * wide)
            probabilities = new(own * vocab * wide)
            del widened, shifted, probabilities
        if wide != compute and play.plan.device == "cpu":
            # cuBLAS adds a product to a wider sum.
            new(vocab * d * compute)
    del read, logits
