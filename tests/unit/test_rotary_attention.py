"""Attention with rotary positions in the layouts of Hugging Face decoders, and look-alikes."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from accelerated_models import WIDTH, Model, assert_same_training, batch
from stepscope.acceleration.report import Report

HEADS, D_HEAD = 4, 4


class Form(NamedTuple):
    key_heads: int = HEADS
    packed: str = ""
    """Of the projections: separate, or one, with q, k and v "by head" or "by part" in a projection
    of the same name, or "in order" in another, as in Phi-3."""
    rotated: int = D_HEAD
    """Entries of a head that are rotated."""
    from_the_end: bool = False
    interleaved: bool = False
    norms: bool = False
    norms_of_all: bool = False
    """Norms over all heads of a token, as in OLMo 2."""
    by_position: bool = False
    """Angles differ within the batch."""
    by_pair: bool = False
    """Tables have one entry per pair, as in GPT-OSS."""


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_by_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    twice = [torch.cat((x, x), dim=-1) for x in (cos, sin)]
    return _apply(q, k, *twice)


_apply = apply_rotary_pos_emb


class Attention(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form, self.scaling = form, 0.5
        self.layer_idx, self.is_causal, self.attention_dropout = 0, True, 0.0
        of_keys = D_HEAD * form.key_heads
        if form.packed == "in order":
            self.head_dim = D_HEAD
            self.qkv_proj = nn.Linear(WIDTH, HEADS * D_HEAD + 2 * of_keys)
            self.o_proj = nn.Linear(HEADS * D_HEAD, WIDTH)
        elif form.packed:
            self.head_size = D_HEAD
            self.query_key_value = nn.Linear(WIDTH, 3 * HEADS * D_HEAD)
            self.dense = nn.Linear(HEADS * D_HEAD, WIDTH)
        else:
            self.head_dim = D_HEAD
            self.q_proj = nn.Linear(WIDTH, HEADS * D_HEAD)
            self.k_proj, self.v_proj = (nn.Linear(WIDTH, of_keys) for _ in range(2))
            self.o_proj = nn.Linear(HEADS * D_HEAD, WIDTH)
        if form.norms:
            self.q_layernorm, self.k_layernorm = nn.LayerNorm(D_HEAD), nn.LayerNorm(D_HEAD)
        if form.norms_of_all:
            self.q_norm, self.k_norm = nn.LayerNorm(HEADS * D_HEAD), nn.LayerNorm(of_keys)
        self.config = type("Config", (), {"_attn_implementation": "sdpa"})()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        layer_past: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, None]:
        assert attention_mask is None
        assert layer_past is None
        assert position_embeddings is not None
        q, k, v = self._projected(hidden_states)
        if self.form.norms:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if self.form.norms_of_all:
            norms = (self.q_norm, self.k_norm)
            q, k = (
                norm(x.transpose(1, 2).flatten(2)).unflatten(-1, (-1, D_HEAD)).transpose(1, 2)
                for norm, x in zip(norms, (q, k), strict=True)
            )
        q, k = self._rotated(q, k, *position_embeddings)
        heads = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scaling, enable_gqa=True
        )
        output = self.o_proj if hasattr(self, "o_proj") else self.dense
        return output(heads.transpose(1, 2).flatten(2)), None

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        if not self.form.packed:
            projections = (self.q_proj, self.k_proj, self.v_proj)
            return tuple(
                layer(x).unflatten(-1, (-1, D_HEAD)).transpose(1, 2) for layer in projections
            )
        if self.form.packed == "in order":
            sizes = [D_HEAD * heads for heads in (HEADS, *[self.form.key_heads] * 2)]
            return tuple(
                part.unflatten(-1, (-1, D_HEAD)).transpose(1, 2)
                for part in self.qkv_proj(x).split(sizes, -1)
            )
        by_head = self.form.packed == "by head"
        sizes, dim = ((HEADS, 3, D_HEAD), 3) if by_head else ((3, HEADS, D_HEAD), 2)
        parts = self.query_key_value(x).unflatten(-1, sizes).unbind(dim)
        return tuple(part.transpose(1, 2) for part in parts)

    def _rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.form.interleaved:
            q, k = (x * cos[:, None] + rotate_pairs(x) * sin[:, None] for x in (q, k))
            return q, k
        sizes = [self.form.rotated, D_HEAD - self.form.rotated]
        turn = 0
        if self.form.from_the_end:
            sizes, turn = sizes[::-1], 1
        parts = [list(x.split(sizes, dim=-1)) for x in (q, k)]
        parts[0][turn], parts[1][turn] = apply_rotary_pos_emb(
            parts[0][turn], parts[1][turn], cos, sin
        )
        return torch.cat(parts[0], -1), torch.cat(parts[1], -1)


class Positioned(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.attention, self.form = Attention(form), form

    def forward(self, x: Tensor) -> Tensor:
        speeds = torch.tensor([1.0, 0.1])[: self.form.rotated // 2]
        angles = torch.outer(torch.arange(x.shape[1]).float(), speeds)
        angles = (angles if self.form.by_pair else torch.cat((angles, angles), dim=-1))[None]
        if self.form.by_position:
            angles = torch.cat([angles * (n + 1) for n in range(x.shape[0])])
        # By position, in the order of its own signature.
        out: Tensor = x + self.attention(x, None, None, (angles.cos(), angles.sin()))[0]
        return out


def accelerated(form: Form) -> Report:
    """Compare losses and gradients in two calls, and return the report."""
    assert "apply_rotary_pos_emb" in vars(sys.modules[Attention.__module__])
    torch.manual_seed(0)
    plain, fused = (Model(lambda: Positioned(form), 1) for _ in range(2))
    fused.load_state_dict(plain.state_dict())
    report = stepscope.accelerate(fused)
    for seed in range(2):
        results = []
        for model in (plain, fused):
            model.zero_grad()
            loss = model(*batch(seed))
            loss.backward()
            results.append((loss.detach(), [p.grad for p in model.parameters()]))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)
    assert report.unchecked == 0
    return report


@pytest.mark.parametrize(
    "form",
    [
        *(Form(key_heads=n) for n in (1, 2, 4)),
        Form(rotated=2),
        Form(packed="in order", key_heads=2, rotated=2),
        Form(packed="in order", key_heads=2, norms=True),
        Form(packed="by head"),
        Form(packed="by head", rotated=2, norms=True),
        Form(key_heads=2, norms_of_all=True),
        Form(norms_of_all=True, by_position=True),
        Form(packed="by head", rotated=2, by_position=True),
        Form(key_heads=2, rotated=2, norms=True),
        Form(rotated=2, by_position=True),
    ],
    ids=str,
)
def test_layouts_that_are_replaced(form: Form) -> None:
    report = accelerated(form)
    assert report.replaced["attention"] == ["blocks.0.attention"]
    assert not any(left.piece == "attention" for left in report.left)


@pytest.mark.parametrize("norms", [True, False])
def test_tables_with_one_entry_per_pair(norms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model whose attributes do not say how many entries are rotated."""
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", apply_by_pair)
    report = accelerated(Form(key_heads=2, by_pair=True, norms=norms))
    assert report.replaced["attention"] == ["blocks.0.attention"]


@pytest.mark.parametrize(
    "form",
    [
        Form(interleaved=True),
        Form(packed="by head", interleaved=True),
        Form(packed="in order", key_heads=1, interleaved=True),
        Form(rotated=2, from_the_end=True),
        Form(packed="by head", rotated=2, from_the_end=True),
        Form(packed="by part"),
    ],
    ids=str,
)
def test_layouts_that_are_taken_back(form: Form) -> None:
    """Modules with the names of known ones, but other pairs, other entries that are rotated, or
    another order in the projection."""
    report = accelerated(form)
    assert "attention" not in report.replaced
    assert any(left.piece == "attention" and "differ" in left.reason for left in report.left)


def test_projections_of_other_sizes_are_left() -> None:
    """Such as one with a single key and value for all heads."""
    model = nn.Sequential(Positioned(Form(packed="by head")))
    model[0].attention.query_key_value = nn.Linear(WIDTH, (HEADS + 2) * D_HEAD)  # type: ignore[union-attr]
    reasons = [left.reason for left in stepscope.accelerate(model).left]
    assert reasons == ["the sizes of its projections are not those of heads"]


def test_linear_attention_is_left() -> None:
    class LinearAttention(nn.Module):
        head_dim = 4

        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
                nn.Linear(WIDTH, WIDTH) for _ in range(4)
            )
            self.feature_map = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            q, k = (self.feature_map(layer(x)) for layer in (self.q_proj, self.k_proj))
            return x + 0.02 * self.o_proj(q @ (k.transpose(1, 2) @ self.v_proj(x)))  # type: ignore[no-any-return]

    report = assert_same_training(LinearAttention)
    assert [left.reason for left in report.left] == ["it has other parts: feature_map"] * 2
    assert len(report.replaced["linear"]) == 8
