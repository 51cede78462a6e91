"""Layers of the Transformer, in plain eager PyTorch or with fused kernels.

Every layer takes `device=` and `dtype=`, so that a large model is initialized on its device, and
has `reset_parameters()`, so that a model created on the meta device can be initialized after
`to_empty`.

Norm and rotation compute in at least float32 and return the dtype of their input. With `fused` the
operations between the matmuls are those of `stepscope.kernels`, and a norm returns the dtype of the
matmul that reads it. The methods `with_fused_projections` use fused QKV and fused gate/up
projections from cached copies of the weights; `policy` is the activation policy. Parameters are the
same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.attention import AttentionFunction
from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels.activation_policy import ALL, NORMS
from stepscope.kernels.embedding import embedded
from stepscope.kernels.feed_forward import feed_forward
from stepscope.kernels.glu import swiglu
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.norm import Normed, add_rms_norm, normed_sum, plain_rms_norm, rms_norm
from stepscope.kernels.rope import plain_rotate, rotated_heads_, rotated_parts_
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.torch_tools.ranges import named


class Linear(nn.Linear):
    """Linear layer without bias."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_in, d_out, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        _fill_truncated_normal(self.weight, math.sqrt(2.0 / (self.in_features + self.out_features)))


class Embedding(nn.Embedding):
    """Token embedding."""

    def __init__(
        self,
        vocab: int,
        d_model: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        fused: bool = False,
    ) -> None:
        super().__init__(vocab, d_model, device=device, dtype=dtype)
        self.fused = fused

    def reset_parameters(self) -> None:
        _fill_truncated_normal(self.weight, 1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return embedded(tokens, self.weight) if self.fused else super().forward(tokens)


class RMSNorm(nn.Module):
    """RMSNorm: x over its root mean square, times a learned weight."""

    def __init__(
        self,
        d_model: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.fused = fused
        self.weight = nn.Parameter(torch.empty(d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:  # (..., d_model)
        if self.fused:
            return rms_norm(x, self.weight, self.eps, matmul_dtype(x))
        return plain_rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + branch and its norm, in one pass."""
        return add_rms_norm(x, branch, self.weight, self.eps, matmul_dtype(x))

    def norm_for_projection(
        self, x: Tensor, branch: Tensor | None, policy: str, amax: bool = False
    ) -> tuple[Tensor, Normed]:
        """Return x + branch (or x, if branch is None) and its norm for a fused projection. `amax`
        is for projections in FP8."""
        stream, normed = normed_sum(
            x, branch, self.weight, self.eps, matmul_dtype(x), units=policy != ALL, amax=amax
        )
        return stream, Normed(normed.value) if policy == NORMS else normed


class RotaryEmbedding(nn.Module):
    """Rotary position embedding: rotates each pair of dimensions of a head by an angle proportional
    to the position.

    Half-split pairs: dimension i is paired with dimension i + d_head/2.
    """

    cos: Tensor  # (context, d_head/2)
    sin: Tensor

    def __init__(
        self,
        d_head: int,
        context: int,
        theta: float = 10_000.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.theta = theta
        table_dtype = _at_least_float32(dtype or torch.get_default_dtype())
        for name in ("cos", "sin"):
            table = torch.empty(context, d_head // 2, device=device, dtype=table_dtype)
            self.register_buffer(name, table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        context, pairs = self.cos.shape
        # float64 on the CPU: in float32 the angle of position 30,000 has an error of 0.001.
        position = torch.arange(context, device="cpu", dtype=torch.float64)
        pair = torch.arange(pairs, device="cpu", dtype=torch.float64)
        angle = torch.outer(position, self.theta ** (-pair / pairs))
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, x: Tensor) -> Tensor:  # (..., seq, d_head)
        return plain_rotate(x, self.cos, self.sin)


class SwiGLU(nn.Module):
    """SwiGLU feed-forward: w2(silu(w1 x) · w3 x)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.fused = fused
        self.w1 = Linear(d_model, d_ff, device=device, dtype=dtype)
        self.w2 = Linear(d_ff, d_model, device=device, dtype=dtype)
        self.w3 = Linear(d_model, d_ff, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:  # (..., d_model)
        out: Tensor
        if self.fused:
            out = self.w2(swiglu(self.w1(x), self.w3(x)))
        else:
            out = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out

    def with_fused_projections(self, x: Normed, copies: WeightCopies, policy: str) -> Tensor:
        """Feed-forward with a fused gate/up projection."""
        return feed_forward(x, self.w1.weight, self.w3.weight, self.w2.weight, copies, policy)


class CausalSelfAttention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        rotary: RotaryEmbedding,
        attention: AttentionFunction,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.fused = fused
        self.n_heads = n_heads
        self.rotary = rotary
        self.attend = attention
        self.query = Linear(d_model, d_model, device=device, dtype=dtype)
        self.key = Linear(d_model, d_model, device=device, dtype=dtype)
        self.value = Linear(d_model, d_model, device=device, dtype=dtype)
        self.output = Linear(d_model, d_model, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, d_model)
        with named("projections"):
            q, k = self.query(x), self.key(x)
            v = self._split_heads(self.value(x))
        with named("rotary"):
            q, k = self._rotated_heads(q), self._rotated_heads(k)
        with named("core"):
            heads = self.attend(q, k, v, is_causal=True)
        with named("projections"):
            out: Tensor = self.output(heads.transpose(1, 2).reshape(x.shape))
        return out

    def with_fused_projections(self, x: Normed, copies: WeightCopies) -> Tensor:
        """Attention with a fused QKV projection."""
        weights = (self.query.weight, self.key.weight, self.value.weight)
        with named("projections"):
            parts = fused_linear(x, weights, copies)
        with named("rotary"):
            q, k, v = rotated_parts_(parts, self.rotary.cos, self.rotary.sin, self.n_heads)
        with named("core"):
            heads = self.attend(q, k, v, is_causal=True)
        with named("projections"):
            merged = heads.transpose(1, 2).reshape(x.value.shape)
            return fused_linear(merged, (self.output.weight,), copies)

    def _rotated_heads(self, x: Tensor) -> Tensor:
        if self.fused:
            return rotated_heads_(x, self.rotary.cos, self.rotary.sin, self.n_heads)
        heads: Tensor = self.rotary(self._split_heads(x))
        return heads

    def _split_heads(self, x: Tensor) -> Tensor:  # -> (batch, heads, seq, d_head)
        return x.view(*x.shape[:-1], self.n_heads, x.shape[-1] // self.n_heads).transpose(1, 2)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _fill_truncated_normal(weight: Tensor, std: float) -> None:
    # Sampled in float32: bfloat16 has too few values near the truncation.
    sample = torch.empty_like(weight, dtype=_at_least_float32(weight.dtype))
    nn.init.trunc_normal_(sample, std=std, a=-3 * std, b=3 * std)
    with torch.no_grad():
        weight.copy_(sample)
