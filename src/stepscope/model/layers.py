"""The layers of the Transformer under study, the plain way in eager PyTorch or fused.

Every layer takes `device=` and `dtype=`, so that a large model is drawn where it will live, and has
`reset_parameters()`, so that one built on the meta device can be filled after `to_empty`.

Norm and rotation compute in float32 at least and answer in the format of their input. With `fused`
the pieces between the matrix products are those of `model.kernels`, and a norm answers in the
format of the product that reads it. With `joined` products that read the same input are one, their
weights come from kept copies, and `keep` says what the backward finds. Parameters are the same.
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
from stepscope.kernels.norm import (
    Normed,
    add_rms_norm,
    normed_sum,
    plain_rms_norm,
    rms_norm,
)
from stepscope.kernels.rope import plain_rotate, rotated_heads_, rotated_parts_
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.torch_tools.ranges import named


class Linear(nn.Linear):
    """A matrix product without bias."""

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
    """One row for each token."""

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
    """x over its root mean square, times a learned weight."""

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

    def of_sum(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """x + branch and its norm, in one pass."""
        return add_rms_norm(x, branch, self.weight, self.eps, matmul_dtype(x))

    def for_products(self, x: Tensor, branch: Tensor | None, keep: str) -> tuple[Tensor, Normed]:
        """x with the branch, where there is one, and its norm for a joined product."""
        stream, normed = normed_sum(
            x, branch, self.weight, self.eps, matmul_dtype(x), units=keep != ALL
        )
        return stream, Normed(normed.value) if keep == NORMS else normed


class RotaryEmbedding(nn.Module):
    """Turns each pair of dimensions of a head by an angle that grows with the position.

    Half-split pairs: dimension i goes with dimension i + d_head/2.
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
        # float64 on the host: in float32 the angle of position 30,000 is off by a thousandth.
        position = torch.arange(context, device="cpu", dtype=torch.float64)
        pair = torch.arange(pairs, device="cpu", dtype=torch.float64)
        angle = torch.outer(position, self.theta ** (-pair / pairs))
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, x: Tensor) -> Tensor:  # (..., seq, d_head)
        return plain_rotate(x, self.cos, self.sin)


class SwiGLU(nn.Module):
    """w2(silu(w1 x) · w3 x)."""

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

    def joined(self, x: Normed, copies: WeightCopies, keep: str) -> Tensor:
        return feed_forward(x, self.w1.weight, self.w3.weight, self.w2.weight, copies, keep)


class CausalSelfAttention(nn.Module):
    """Multi-head attention of each position to itself and those before it."""

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

    def joined(self, x: Normed, copies: WeightCopies) -> Tensor:
        weights = (self.query.weight, self.key.weight, self.value.weight)
        with named("projections"):
            parts = fused_linear(x, weights, copies)
        with named("rotary"):
            q, k, v = rotated_parts_(parts, self.rotary.cos, self.rotary.sin, self.n_heads)
        with named("core"):
            heads = self.attend(q, k, v, is_causal=True)
        with named("projections"):
            together = heads.transpose(1, 2).reshape(x.value.shape)
            return fused_linear(together, (self.output.weight,), copies)

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
    # Drawn in float32: bfloat16 has too few values near the cut.
    drawn = torch.empty_like(weight, dtype=_at_least_float32(weight.dtype))
    nn.init.trunc_normal_(drawn, std=std, a=-3 * std, b=3 * std)
    with torch.no_grad():
        weight.copy_(drawn)
