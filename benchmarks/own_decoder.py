"""A decoder of classes of its own, with the operators of small public training programs: a linear
class that casts its weight, norms without weights, normed q and k, rotary positions, squared relu,
learned scales of the residual stream, soft-capped logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

CAP = 15.0


def norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), -1)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        for name in ("q", "k", "v", "out"):
            setattr(self, name, Linear(width, width, bias=False))
        self.up = Linear(width, 4 * width, bias=False)
        self.down = Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = norm(x)
        q, k, v = (
            project(normed).view(batch, length, self.heads, -1).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q, k = (norm(rotated(y, cos, sin)) for y in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.relu(self.up(norm(x))).square())


class Decoder(nn.Module):
    """Returns its loss for (ids, targets)."""

    def __init__(self, vocab: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.scales = nn.Parameter(torch.ones(layers, 2))
        self.head = Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = first = norm(self.embedding(ids))
        size = x.shape[-1] // self.blocks[0].heads
        steps = torch.arange(0, size, 2, device=ids.device) / size
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), 10_000.0**-steps)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for number, block in enumerate(self.blocks):
            x = block(self.scales[number, 0] * x + self.scales[number, 1] * first, cos, sin)
        logits = CAP * torch.tanh(self.head(norm(x)).float() / CAP)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
