"""A decoder as Hugging Face's Llama is, which needs only torch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN, HEADS, KEY_HEADS, VOCAB = 16, 40, 4, 2, 50
D_HEAD = WIDTH // HEADS
LAYERS = 2
Positions = tuple[Tensor, Tensor]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x.float() * inverse).to(x.dtype)


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return rotated(q), rotated(k)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.scaling, self.layer_idx = D_HEAD, D_HEAD**-0.5, 0
        self.is_causal, self.attention_dropout = True, 0.0
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = (
            nn.Linear(WIDTH, KEY_HEADS * D_HEAD, bias=False) for _ in range(2)
        )
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.config = SimpleNamespace(_attn_implementation="sdpa")

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Positions,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
    ) -> tuple[Tensor, None]:
        assert attention_mask is None
        assert past_key_values is None
        q, k, v = (
            layer(hidden_states).unflatten(-1, (-1, D_HEAD)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        heads = functional.scaled_dot_product_attention(
            q, k.to(q.dtype), v.to(q.dtype), is_causal=True, scale=self.scaling, enable_gqa=True
        )
        return self.o_proj(heads.transpose(1, 2).flatten(2)), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = Attention(), GatedMLP()

    def forward(self, hidden_states: Tensor, position_embeddings: Positions) -> Tensor:
        branch, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
        )
        stream = hidden_states + branch
        out: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return out


class Decoder(nn.Module):
    """Returns its loss. `reentrant` checkpoints the blocks, with that setting of torch."""

    def __init__(self, tied: bool = True, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.reentrant = reentrant

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        at = torch.arange(tokens.shape[1], device=tokens.device).float()
        angles = torch.outer(at, torch.tensor([1.0, 0.1], device=tokens.device))
        angles = torch.cat((angles, angles), dim=-1)[None]
        positions = (angles.cos(), angles.sin())
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x, position_embeddings=positions)
            else:
                # The reentrant form takes no keywords.
                x = checkpoint(_run, layer, x, positions, use_reentrant=self.reentrant)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits.float(), targets.flatten())


def _run(layer: nn.Module, x: Tensor, positions: Positions) -> Any:
    return layer(x, position_embeddings=positions)


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**options)


def batch(step: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Return a batch; every third one is longer."""
    generator = torch.Generator().manual_seed(step)
    length = 6 if step % 3 == 2 else 4
    tokens = torch.randint(VOCAB, (2, rows, length), generator=generator)
    return tokens[0], tokens[1]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 8,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    between: Callable[[int], object] = lambda _: None,
    after: Callable[[], object] = lambda: None,
) -> list[float]:
    """Train under autocast, or without it for None, and return the losses. `between` is called
    before a step with its number, `after` at its end."""
    optimizer = optimizer or adamw(model)
    losses = []
    for step in range(steps):
        between(step)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        losses.append(float(loss.detach()))
    return losses
