"""FLOPs and bytes of attention, from shapes alone. Imports without torch.

FLOPs are two per multiply-add and count the two matmuls of the forward pass, not the softmax. A
causal mask leaves half of the score matrix, counted as exactly one half. There are two conventions
for the backward pass, and both are here:

- the FLOPs of a *model* count twice the forward pass: four gradient matmuls, no recomputation;
- the TFLOP/s of a *kernel* counts 2.5 times the forward pass: a flash backward pass recomputes the
  scores.
"""

from __future__ import annotations

import msgspec

FLOAT32_BYTES = 4
BOOL_BYTES = 1


class AttentionShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one attention: per head, q and the output have `seq_q` rows, k and v `seq_k`."""

    batch: int
    heads: int
    seq_q: int
    seq_k: int
    d_head: int

    @property
    def rows(self) -> int:
        """Rows of the score matrix over all heads."""
        return self.batch * self.heads * self.seq_q

    @property
    def scores(self) -> int:
        return self.rows * self.seq_k

    @property
    def query_elements(self) -> int:
        return self.rows * self.d_head

    @property
    def key_elements(self) -> int:
        return self.batch * self.heads * self.seq_k * self.d_head


def forward_flops(shape: AttentionShape, *, causal: bool) -> int:
    """FLOPs of the forward pass, scores and weighted sum: 4·B·H·Sq·Sk·D, half under a causal
    mask."""
    full = 4 * shape.scores * shape.d_head
    return full // 2 if causal else full


def pair_flops(pairs: int, *, heads: int, d_head: int) -> int:
    """FLOPs of the forward pass over the visible query and key pairs of one head, all batches
    together (`visibility.visible_pairs`): what `ScoreRules` leave. Windows and documents have no
    fixed share of the scores as a causal mask has, so that pairs are counted."""
    return 4 * pairs * heads * d_head


def kernel_backward_flops(shape: AttentionShape, *, causal: bool) -> int:
    """FLOPs of the backward pass by the kernel convention: five matmuls where the forward pass has
    two."""
    return 5 * forward_flops(shape, causal=causal) // 2


def forward_bytes(shape: AttentionShape, element_bytes: int) -> int:
    """Minimum traffic of a forward pass: q, k, v read once; output and float32 log-sum-exp
    written."""
    tensors = 2 * shape.query_elements + 2 * shape.key_elements
    return tensors * element_bytes + shape.rows * FLOAT32_BYTES


def backward_bytes(shape: AttentionShape, element_bytes: int) -> int:
    """Minimum traffic of a backward pass: q, k, v, output, its gradient and log-sum-exp read once;
    the gradients of q, k, v written."""
    read = 3 * shape.query_elements + 2 * shape.key_elements
    written = shape.query_elements + 2 * shape.key_elements
    return (read + written) * element_bytes + shape.rows * FLOAT32_BYTES


def input_bytes(shape: AttentionShape, element_bytes: int) -> int:
    """Bytes of q, k and v."""
    return (shape.query_elements + 2 * shape.key_elements) * element_bytes


def output_bytes(shape: AttentionShape, element_bytes: int) -> int:
    return shape.query_elements * element_bytes


def probability_bytes(
    shape: AttentionShape, element_bytes: int, *, float32_softmax: bool = False
) -> int:
    """Bytes of the probabilities that reference attention saves for backward. CUDA autocast runs
    softmax in float32 and casts the result for the next matmul, so both tensors are saved."""
    bytes_per_score = element_bytes
    if float32_softmax:
        bytes_per_score += FLOAT32_BYTES
    return shape.scores * bytes_per_score


def mask_bytes(shape: AttentionShape, *, causal: bool) -> int:
    """Bytes of the boolean mask that reference attention saves; all heads share it."""
    return shape.seq_q * shape.seq_k * BOOL_BYTES if causal else 0


def log_sum_exp_bytes(shape: AttentionShape) -> int:
    return shape.rows * FLOAT32_BYTES
