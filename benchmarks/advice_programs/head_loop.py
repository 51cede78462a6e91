"""A GPT that loops over its heads in Python: many small operators instead of a few large ones."""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Head(nn.Module):
    def __init__(self, width: int, size: int, length: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(width, size, bias=False) for _ in range(3))
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).bool())

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / math.sqrt(self.key.out_features)
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        return functional.softmax(scores, dim=-1) @ self.value(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(width, width // heads, length) for _ in range(heads))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, length)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, length) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (
        ("steps", 100_000), ("vocab", 2000), ("width", 384), ("layers", 12), ("heads", 12),
        ("length", 128), ("batch", 4),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = GPT(given.vocab, given.width, given.layers, given.heads, given.length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(given.steps):
        batch = torch.randint(given.vocab, (given.batch, given.length + 1), device=device)
        loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
