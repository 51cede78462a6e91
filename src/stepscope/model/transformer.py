"""The Transformer language model: pre-norm, rotary positions, SwiGLU, untied head.

The residual stream has the dtype of the weights: under autocast matmuls return the lower precision,
and adding that to the float32 stream gives a float32 stream. With `narrow_stream` it has the lower
precision from the embedding on, and half the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

from stepscope.attention import AttentionFunction
from stepscope.attention import attention as default_attention
from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels import linear_cross_entropy
from stepscope.kernels.activation_policy import ALL
from stepscope.kernels.fp8.layers import Fp8Layers
from stepscope.kernels.fp8.recipe import Recipe
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.model.config import ModelConfig
from stepscope.model.layers import (
    CausalSelfAttention,
    Embedding,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
)
from stepscope.torch_tools.ranges import named

Stream = tuple[Tensor, Tensor | None]
"""The residual stream, and a branch that has not been added to it yet."""


class Block(nn.Module):
    """Transformer block: attention, then feed-forward, each with a norm and a residual add."""

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
                x, read = self.feed_forward_norm.add_and_norm(x, branch)
        else:
            with named("attention"):
                x = x + self.attention(read)
            with named("norm"):
                read = self.feed_forward_norm(x)
        with named("feed-forward"):
            out: Tensor = x + self.feed_forward(read)
        return out

    def with_fused_projections(
        self, x: Tensor, branch: Tensor | None, copies: WeightCopies, policy: str
    ) -> tuple[Tensor, Tensor]:
        """Forward with fused projections. The last branch is not added to the residual stream yet:
        the next norm adds it in the same pass. Takes and returns such a stream."""
        amax = copies.notes_amax
        with named("norm"):
            x, read = self.attention_norm.norm_for_projection(x, branch, policy, amax)
        with named("attention"):
            branch = self.attention.with_fused_projections(read, copies)
        with named("norm"):
            x, read = self.feed_forward_norm.norm_for_projection(x, branch, policy, amax)
        with named("feed-forward"):
            return x, self.feed_forward.with_fused_projections(read, copies, policy)


class Head(Linear):
    """Returns logits, or with targets the mean loss. Both are computed in this module, so that
    FSDP, which gathers a module's weights for its forward pass, gathers these too."""

    def forward(
        self,
        x: Tensor,  # (..., d_model)
        targets: Tensor | None = None,
        copies: WeightCopies | None = None,
    ) -> Tensor:
        if targets is not None:
            return linear_cross_entropy(x, self.weight, targets, copies=copies)
        with named("head"):
            return super().forward(x)


class TransformerLM(nn.Module):
    """Decoder-only Transformer: returns logits of the next token, or with targets the mean loss,
    without all logits in memory.

    `fused` uses the kernels of `stepscope.kernels` between the matmuls. `fused_projections` also
    uses fused QKV and gate/up projections from cached copies of the weights in the matmul dtype
    (`copies`); `activation_policy` then says for each block what is saved for backward
    (`kernels.activation_policy`). `fp8`, a recipe of `kernels.fp8` or `Fp8Layers`, runs those fused
    projections in FP8 that gain from it; weights, norms, embedding and head stay as they are.
    `checkpoint` has the blocks per checkpointed segment of each
    level, outermost first (`model.checkpointing`).
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionFunction = default_attention,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        fused: bool = False,
        checkpoint: tuple[int, ...] = (),
        fused_projections: bool = False,
        activation_policy: tuple[str, ...] = (),
        narrow_stream: bool = False,
        fp8: Fp8Layers | Recipe | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.narrow_stream = narrow_stream
        self.context = config.context
        self.checkpoint = checkpoint
        self.fused_projections = fused_projections
        self.activation_policy = activation_policy or (ALL,) * config.n_layers
        self.copies = WeightCopies()
        self.embedding = Embedding(
            config.vocab, config.d_model, device=device, dtype=dtype, fused=fused
        )
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
        self.set_fp8(fp8)

    def set_fp8(self, fp8: Fp8Layers | Recipe | str | None) -> None:
        """Run fused projections in FP8 by a recipe, or by `Fp8Layers` with settings for layers;
        None turns it off. Without fused projections it has no effect."""
        layers = fp8 if fp8 is None or isinstance(fp8, Fp8Layers) else Fp8Layers(fp8)
        if layers is not None:
            layers.name(self.named_parameters())
        self.copies.fp8 = layers

    @property
    def needs_full_weights(self) -> str:
        """Reason why `FSDP` cannot shard the model; empty if it can."""
        if not self.fused_projections:
            return ""
        return f"fused projections{' in FP8' if self.copies.fp8 else ''} read full weights"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> TransformerLM:
        """Move the model; the layers in FP8 then have new parameters."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if isinstance(self.copies.fp8, Fp8Layers):
            self.set_fp8(self.copies.fp8)
        return self

    def set_fused(self, on: bool) -> None:
        """Switch the fused layers and fused projections on or off."""
        self.fused_projections = on
        for module in self.modules():
            if isinstance(module, Embedding | RMSNorm | SwiGLU | CausalSelfAttention):
                module.fused = on

    def forward(
        self,
        tokens: Tensor,  # (batch, seq)
        targets: Tensor | None = None,  # (batch, seq)
    ) -> Tensor:  # (batch, seq, vocab), or the loss
        if tokens.dim() != 2:
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}; they need (batch, seq)")
        if tokens.shape[-1] > self.context:
            raise ValueError(
                f"a sequence of {tokens.shape[-1]} tokens exceeds the context of {self.context}: "
                "build the model with a larger context"
            )
        with named("embedding"):
            x = self.embedding(tokens)
            if self.narrow_stream:
                x = x.to(matmul_dtype(x))
        # torch.compile fuses the naive version itself.
        fused_projections = self.fused_projections and not torch.compiler.is_compiling()
        x, branch = self._through_blocks(
            x, None, 0, len(self.blocks), self.checkpoint, fused_projections
        )
        with named("norm"):
            x = self.norm(x) if branch is None else self._last_norm(x, branch)
        out: Tensor = self.head(x, targets, self.copies if fused_projections else None)
        return out

    def _last_norm(self, x: Tensor, branch: Tensor) -> Tensor:
        amax = self.copies.notes_amax
        return self.norm.norm_for_projection(x, branch, ALL, amax)[1].value

    def _through_blocks(
        self,
        x: Tensor,
        branch: Tensor | None,
        first: int,
        end: int,
        levels: tuple[int, ...],
        fused_projections: bool,
    ) -> Stream:
        if not levels:
            for index in range(first, end):
                with named(f"block {index}"):
                    x, branch = self._through(index, x, branch, fused_projections)
            return x, branch
        for start in range(first, end, levels[0]):
            # Tensors are passed as separate arguments: an outer segment would not free tensors
            # inside a container. Nothing in a block is random, so no RNG state has to be saved.
            x, branch = checkpointed(
                self._through_blocks,
                x,
                branch,
                start,
                min(start + levels[0], end),
                levels[1:],
                fused_projections,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        return x, branch

    def _through(
        self, index: int, x: Tensor, branch: Tensor | None, fused_projections: bool
    ) -> Stream:
        block = self.blocks[index]
        if not fused_projections:
            return block(x), None
        assert isinstance(block, Block)
        return block.with_fused_projections(x, branch, self.copies, self.activation_policy[index])
