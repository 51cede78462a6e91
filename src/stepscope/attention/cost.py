"""What attention costs, from shapes alone. Loads without torch.

FLOPs are two per multiply-add and count the two matrix products of the forward, not the softmax.
A causal mask leaves half of the score matrix, counted as exactly one half. For the backward there
are two conventions, and both are here:

- a *model's* FLOPs take twice the forward: four products of the gradient, no recomputation;
- a *kernel's* TFLOP/s takes two and a half times: a flash backward computes the scores again.
"""

from __future__ import annotations

import msgspec

FLOAT32_BYTES = 4
BOOL_BYTES = 1


class AttentionShape(msgspec.Struct, frozen=True, kw_only=True):
    """Queries and outputs have `seq_q` rows in each head, keys and values `seq_k`."""

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
    """Scores and weighted sum: 4·B·H·Sq·Sk·D, half of that under a causal mask."""
    full = 4 * shape.scores * shape.d_head
    return full // 2 if causal else full


def backward_flops(shape: AttentionShape, *, causal: bool) -> int:
    """The backward as a model's FLOPs count it: twice the forward."""
    return 2 * forward_flops(shape, causal=causal)


def kernel_backward_flops(shape: AttentionShape, *, causal: bool) -> int:
    """The backward as a kernel's rate counts it: five products where the forward has two."""
    return 5 * forward_flops(shape, causal=causal) // 2


def forward_bytes(shape: AttentionShape, element_bytes: int) -> int:
    """Least traffic of a forward: q, k, v read once; output and float32 log-sum-exp written."""
    tensors = 2 * shape.query_elements + 2 * shape.key_elements
    return tensors * element_bytes + shape.rows * FLOAT32_BYTES


def backward_bytes(shape: AttentionShape, element_bytes: int) -> int:
    """Least traffic of a backward: q, k, v, output, its gradient and log-sum-exp read once;
    the gradients of q, k, v written."""
    read = 3 * shape.query_elements + 2 * shape.key_elements
    written = shape.query_elements + 2 * shape.key_elements
    return (read + written) * element_bytes + shape.rows * FLOAT32_BYTES


def reference_forward_bytes(
    shape: AttentionShape, element_bytes: int, *, float32_softmax: bool = False
) -> int:
    """What the operators of the reference form read and write in a causal forward: the scores are
    written, scaled, masked, normalised and read again, so eight times their size; CUDA's autocast
    adds two casts around a softmax in float32."""
    scores = 8 * element_bytes + (4 * FLOAT32_BYTES if float32_softmax else 0)
    tensors = 2 * shape.query_elements + 2 * shape.key_elements
    return shape.scores * scores + tensors * element_bytes + mask_bytes(shape, causal=True)


def reference_backward_bytes(
    shape: AttentionShape, element_bytes: int, *, float32_softmax: bool = False
) -> int:
    """The same for the backward: the gradient of the probabilities is written, goes through
    softmax, mask and scale, and is read by two products; the probabilities are read twice."""
    narrow = shape.scores * element_bytes
    scores = 10 * narrow + 5 * shape.scores * FLOAT32_BYTES if float32_softmax else 11 * narrow
    # The output's gradient and one operand for each of four products; three gradients.
    read = 3 * shape.query_elements + 2 * shape.key_elements
    written = shape.query_elements + 2 * shape.key_elements
    return scores + (read + written) * element_bytes + mask_bytes(shape, causal=True)


def input_bytes(shape: AttentionShape, element_bytes: int) -> int:
    """q, k and v."""
    return (shape.query_elements + 2 * shape.key_elements) * element_bytes


def output_bytes(shape: AttentionShape, element_bytes: int) -> int:
    return shape.query_elements * element_bytes


def probability_bytes(
    shape: AttentionShape, element_bytes: int, *, float32_softmax: bool = False
) -> int:
    """The probabilities that the reference form keeps. CUDA's autocast runs softmax in float32 and
    casts the result for the next product, so both of them stay."""
    kept = element_bytes
    if float32_softmax:
        kept += FLOAT32_BYTES
    return shape.scores * kept


def mask_bytes(shape: AttentionShape, *, causal: bool) -> int:
    """The boolean mask that the reference form keeps; all heads share it."""
    return shape.seq_q * shape.seq_k * BOOL_BYTES if causal else 0


def log_sum_exp_bytes(shape: AttentionShape) -> int:
    return shape.rows * FLOAT32_BYTES


def reference_saved_bytes(
    shape: AttentionShape, element_bytes: int, *, causal: bool, float32_softmax: bool = False
) -> int:
    """Saved for backward by the reference form: q, k, v, the probabilities and the mask."""
    return (
        input_bytes(shape, element_bytes)
        + probability_bytes(shape, element_bytes, float32_softmax=float32_softmax)
        + mask_bytes(shape, causal=causal)
    )


def flash_saved_bytes(shape: AttentionShape, element_bytes: int) -> int:
    """Saved for backward by a flash form: q, k, v, the output and the log-sum-exp."""
    tensors = input_bytes(shape, element_bytes) + output_bytes(shape, element_bytes)
    return tensors + log_sum_exp_bytes(shape)
