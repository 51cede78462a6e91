"""Programs with planted lines: a comment names the rule that has to find the line."""

from __future__ import annotations

import re

COSTLY = """
import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, TOKENS, BATCH = 96, 16, 4, 16, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        size = WIDTH // HEADS
        mask = torch.triu(torch.full((TOKENS, TOKENS), float("-inf")), 1)  # constant
        outs = []
        for i in range(HEADS):  # loop_over_heads
            part = slice(i * size, (i + 1) * size)
            outs.append(self.one(q[..., part], k[..., part], v[..., part], mask))
        return torch.cat(outs, -1)

    def one(self, q, k, v, mask):
        return (q @ k.transpose(-2, -1) + mask).softmax(-1) @ v


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x):
        out = torch.zeros_like(x)
        for expert in self.experts:  # loop_over_experts
            out += expert(x).tanh()
        return out


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.update = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = x.new_zeros(BATCH, WIDTH)
        steps = []
        for t in range(TOKENS):  # loop_over_time
            h = torch.tanh(self.update(torch.cat((x[:, t], h), -1)))
            steps.append(h)
        return torch.stack(steps, 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention, self.experts, self.recurrent = Attention(), Experts(), Recurrent()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.head, self.kind = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, 3)

    def forward(self, tokens):
        x = self.embedding(tokens)  # padding
        for norm, part in zip(self.norms, (self.attention, self.experts, self.recurrent)):
            x = x + part(norm(x))
        x = x.bfloat16().float()  # casts
        x = x.transpose(0, 1).contiguous().transpose(0, 1)  # layout
        rows = [row * self.scale(row) for row in x]  # loop_over_samples
        kind = self.kind(x)[:, -1]  # unused_rows
        return self.head(torch.stack(rows)), kind

    def scale(self, row):
        return torch.sigmoid(row.mean() - row.amax())


def update(parameters, moments):
    for p, moment in zip(parameters, moments):  # loop_over_parameters
        moment.mul_(0.9).add_(p.grad)
        p.sub_(moment, alpha=1e-3)


model = Model()
parameters = list(model.parameters())
moments = [torch.zeros_like(p) for p in parameters]
seen = []
for step in range(24):
    tokens = torch.randint(1, VOCABULARY, (BATCH, TOKENS))
    tokens[:, TOKENS // 2 :] = 0
    labels = tokens.masked_fill(tokens == 0, -100)
    logits, kind = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # ignored_labels
    loss = loss + kind.float().softmax(-1).mean()
    loss.backward()
    with torch.no_grad():
        update(parameters, moments)
    model.zero_grad()
    seen.append((loss.item(), torch.get_rng_state().sum().item()))  # reads
    labels[labels >= 0].nonzero()  # reads
"""

GOOD = """
import torch
from torch import nn
from torch.nn import functional as F

HEADS = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(96, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(32, 96)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Model()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(24):
    for _ in range(2):
        tokens = torch.randint(0, 96, (4, 17))
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


def planted(program: str) -> set[tuple[str, int]]:
    """The rules and the lines that comments name."""
    lines = enumerate(program.splitlines(), start=1)
    found = ((re.search(r"  # (\w+)$", line), number) for number, line in lines)
    return {(match[1], number) for match, number in found if match}
