"""The Transformer language model under study: pre-norm, rotary positions, SwiGLU, untied head.

The residual stream has the weights' format: under autocast the matrix products answer in the lower
format, and adding their answer to the float32 stream leaves a float32 stream.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as run_again_in_backward

from stepscope.attention import AttentionFunction
from stepscope.attention import attention as default_attention
from stepscope.model.config import ModelConfig
from stepscope.model.kernels import linear_cross_entropy
from stepscope.model.layers import (
    CausalSelfAttention,
    Embedding,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
)
from stepscope.ranges import named


class Block(nn.Module):
    """Attention, then feed-forward, each added to the stream that it read through a norm."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryEmbedding,
        attention: AttentionFunction,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, device=device, dtype=dtype, fused=fused)
        self.attention = CausalSelfAttention(
            config.d_model,
            config.n_heads,
            rotary,
            attention,
            device=device,
            dtype=dtype,
            fused=fused,
        )
        self.feed_forward_norm = RMSNorm(config.d_model, device=device, dtype=dtype, fused=fused)
        self.feed_forward = SwiGLU(
            config.d_model, config.d_ff, device=device, dtype=dtype, fused=fused
        )

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, d_model)
        with named("norm"):
            read = self.attention_norm(x)
        if self.feed_forward_norm.fused:
            with named("attention"):
                branch = self.attention(read)
            with named("norm"):
                x, read = self.feed_forward_norm.of_sum(x, branch)
        else:
            with named("attention"):
                x = x + self.attention(read)
            with named("norm"):
                read = self.feed_forward_norm(x)
        with named("feed-forward"):
            out: Tensor = x + self.feed_forward(read)
        return out


class Head(Linear):
    """Logits, or with targets the mean loss. Both are made in here, so that whoever gathers a
    module's weights for its forward gathers these too."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:  # (..., d_model)
        if targets is not None:
            return linear_cross_entropy(x, self.weight, targets)
        with named("head"):
            return super().forward(x)


class TransformerLM(nn.Module):
    """Tokens in, logits of the next token out; with targets the mean loss, and never all logits.

    `fused` takes the pieces of `model.kernels` between the matrix products. `checkpoint` has the
    blocks of each stretch that keeps its input only (`model.checkpointing`), outermost first.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionFunction = default_attention,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        fused: bool = False,
        checkpoint: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.config = config
        self.context = config.context
        self.checkpoint = checkpoint
        self.embedding = Embedding(config.vocab, config.d_model, device=device, dtype=dtype)
        # One table for all blocks.
        rotary = RotaryEmbedding(
            config.d_head, config.context, config.rope_theta, device=device, dtype=dtype
        )
        self.blocks = nn.ModuleList(
            Block(config, rotary, attention, device=device, dtype=dtype, fused=fused)
            for _ in range(config.n_layers)
        )
        self.norm = RMSNorm(config.d_model, device=device, dtype=dtype, fused=fused)
        self.head = Head(config.d_model, config.vocab, device=device, dtype=dtype)

    def forward(
        self,
        tokens: Tensor,  # (batch, seq)
        targets: Tensor | None = None,  # (batch, seq)
    ) -> Tensor:  # (batch, seq, vocab), or the loss
        if tokens.shape[-1] > self.context:
            raise ValueError(
                f"sequence of {tokens.shape[-1]} tokens in a model for {self.context}: "
                "build the model with a larger context"
            )
        with named("embedding"):
            x = self.embedding(tokens)
        x = self._through_blocks(x, 0, len(self.blocks), self.checkpoint)
        with named("norm"):
            x = self.norm(x)
        out: Tensor = self.head(x, targets)
        return out

    def _through_blocks(self, x: Tensor, first: int, end: int, levels: tuple[int, ...]) -> Tensor:
        if not levels:
            for number in range(first, end):
                with named(f"block {number}"):
                    x = self.blocks[number](x)
            return x
        for start in range(first, end, levels[0]):
            # Nothing in a block is random, so no generator's state has to be kept.
            x = run_again_in_backward(
                self._through_blocks,
                x,
                start,
                min(start + levels[0], end),
                levels[1:],
                use_reentrant=False,
                preserve_rng_state=False,
            )
        return x
