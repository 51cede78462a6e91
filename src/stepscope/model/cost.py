"""FLOPs and bytes of a model, from its configuration alone. Imports without torch.

FLOPs are those that MFU counts: two per multiply-add of the matmuls; the embedding lookup, norms,
rotations, softmax and the optimizer are not counted, nor is recomputation. The backward pass is
twice the forward pass. A causal mask halves attention.

Bytes of saved activations are those of `TransformerLM` and `cross_entropy` in eager PyTorch.
"""

from __future__ import annotations

import msgspec

from stepscope.attention import cost as attention_cost
from stepscope.attention import implementation
from stepscope.attention.cost import AttentionShape
from stepscope.model.config import WIDTHS, ModelConfig, Precision

_FLOAT32 = 4
_INT64 = 8
_ATTENTION_OUTPUT = "attention output"


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters by part; `attention`, `feed_forward` and `norms` over all layers."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.feed_forward + self.norms + self.head

    @property
    def multiplied(self) -> int:
        """Parameters of the matmuls: neither the embedding nor the norms."""
        return self.attention + self.feed_forward + self.head


def parameters(config: ModelConfig) -> Parameters:
    return Parameters(
        embedding=config.vocab * config.d_model,
        attention=config.n_layers * 4 * config.d_model**2,
        feed_forward=config.n_layers * 3 * config.d_model * config.d_ff,
        norms=(2 * config.n_layers + 1) * config.d_model,
        head=config.vocab * config.d_model,
    )


class Flops(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of one step, split into linear layers and attention."""

    forward_linear: int
    forward_attention: int

    @property
    def forward(self) -> int:
        return self.forward_linear + self.forward_attention

    @property
    def backward(self) -> int:
        return 2 * self.forward

    @property
    def step(self) -> int:
        """Forward and backward; the optimizer is not counted."""
        return self.forward + self.backward

    @property
    def step_linear(self) -> int:
        return 3 * self.forward_linear


def flops(config: ModelConfig, batch: int, context: int, causal: bool = True) -> Flops:
    """Return the FLOPs of one step over `batch` sequences of `context` tokens."""
    per_layer = attention_cost.forward_flops(_shape(config, batch, context), causal=causal)
    return Flops(
        forward_linear=2 * batch * context * parameters(config).multiplied,
        forward_attention=config.n_layers * per_layer,
    )


def weight_bytes(config: ModelConfig, precision: Precision) -> int:
    """Return the bytes of all weights, and of all gradients, which have their dtype even under
    autocast."""
    return parameters(config).total * WIDTHS[precision.weights]


def optimizer_bytes(config: ModelConfig, precision: Precision) -> int:
    """Return the bytes of AdamW's state: two moments in the dtype of the weights; with master
    weights three tensors in float32."""
    if precision.master:
        return 3 * parameters(config).total * _FLOAT32
    return 2 * weight_bytes(config, precision)


class Activations(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes saved for backward: each storage once, without weights and scalars."""

    block: dict[str, int]
    """One block, by item."""
    n_layers: int
    embedding: int
    head: int
    """Final norm and input of the head."""
    loss: int
    weight_copies: int
    """Autocast's copies of the weights in the matmul dtype."""

    @property
    def per_block(self) -> int:
        return sum(self.block.values())

    @property
    def blocks(self) -> int:
        return self.n_layers * self.per_block

    @property
    def total(self) -> int:
        return self.blocks + self.embedding + self.head + self.loss + self.weight_copies


def activation_bytes(
    config: ModelConfig,
    batch: int,
    context: int,
    precision: Precision,
    attention: str,
    device_type: str = "cuda",
) -> Activations:
    """Return the bytes that forward and loss save for backward with that attention implementation.

    `device_type` matters in two respects: CUDA autocast runs the softmax of reference attention in
    float32 and CPU autocast does not, and the layout of the output of `sdpa` differs. Exact for
    `reference`; for `sdpa` except for the padding of some of torch's kernels: heads to a multiple
    of 8, the log-sum-exp to a multiple of 32 rows.
    """
    tokens = batch * context
    compute_bytes = WIDTHS[precision.compute]
    stream = tokens * config.d_model  # elements of one activation of the residual stream's width
    hidden = tokens * config.d_ff
    # Autocast casts the float32 output of the norm again for each matmul that reads it.
    cast = precision.autocast and not precision.narrow_stream
    readers = {"q, k, v": 3, "w1, w3": 2} if cast else {"q, k, v": 1, "w1, w3": 1}

    block = {
        "attention norm": _norm_bytes(tokens, config.d_model),
        "q, k, v projection input": readers["q, k, v"] * stream * compute_bytes,
        **_attention_items(config, batch, context, precision, attention, device_type),
        "output projection input": stream * compute_bytes,
        "feed-forward norm": _norm_bytes(tokens, config.d_model),
        "w1, w3 input": readers["w1, w3"] * stream * compute_bytes,
        "w1 output": hidden * compute_bytes,
        "silu output": hidden * compute_bytes,
        "w3 output": hidden * compute_bytes,
        "w2 input": hidden * compute_bytes,
    }
    return Activations(
        block=block,
        n_layers=config.n_layers,
        embedding=tokens * _INT64,
        head=_norm_bytes(tokens, config.d_model) + stream * compute_bytes,
        # log p of every token of the vocabulary in float32, and the targets
        loss=tokens * config.vocab * _FLOAT32 + tokens * _INT64,
        weight_copies=parameters(config).multiplied * compute_bytes if precision.autocast else 0,
    )


def _shape(config: ModelConfig, batch: int, context: int) -> AttentionShape:
    return AttentionShape(
        batch=batch, heads=config.n_heads, seq_q=context, seq_k=context, d_head=config.d_head
    )


def _norm_bytes(tokens: int, d_model: int) -> int:
    """Return the bytes that a norm saves: input and normalized input in float32, and the inverse
    root mean square of each token."""
    return (2 * tokens * d_model + tokens) * _FLOAT32


def _attention_items(
    config: ModelConfig,
    batch: int,
    context: int,
    precision: Precision,
    attention: str,
    device_type: str,
) -> dict[str, int]:
    shape = _shape(config, batch, context)
    compute_bytes = WIDTHS[precision.compute]
    items = {"q, k, v": attention_cost.input_bytes(shape, compute_bytes)}
    chosen = implementation(attention)
    if not chosen.saves_scores:
        items["log-sum-exp"] = attention_cost.log_sum_exp_bytes(shape)
        if not _output_is_projection_input(chosen.name, compute_bytes, device_type):
            items[_ATTENTION_OUTPUT] = attention_cost.output_bytes(shape, compute_bytes)
        return items
    if chosen.name == "sdpa_math":
        # It saves scaled copies, 16-bit dtypes in float32, and masks by adding -inf.
        return {
            "q, k, v": attention_cost.input_bytes(shape, _FLOAT32),
            "probabilities": attention_cost.probability_bytes(shape, _FLOAT32),
        }
    float32_softmax = precision.autocast and device_type == "cuda"
    return items | {
        "probabilities": attention_cost.probability_bytes(
            shape, compute_bytes, float32_softmax=float32_softmax
        ),
        "mask": attention_cost.mask_bytes(shape, causal=True),
    }


def _output_is_projection_input(attention: str, compute_bytes: int, device_type: str) -> bool:
    """Return whether the output projection reads the attention output without a copy. torch's
    memory-efficient kernel, its choice for float32 on CUDA, writes the layout of the projection's
    input; for all others both the output and a copy are saved."""
    if device_type != "cuda":
        return False
    return attention == "sdpa_efficient" or (
        attention in ("sdpa", "auto") and compute_bytes == _FLOAT32
    )
