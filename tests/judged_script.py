"""A small training script, and edits of it that only look faster, or that are."""
# ruff: noqa: E501

from __future__ import annotations

SCRIPT = """
import math, sys, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCAB, WIDTH, HEADS, LENGTH, BATCH, MICRO, LAYERS = 64, 32, 2, 16, 4, 2, 2

class Text(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        source = torch.Generator().manual_seed(index)
        return torch.randint(VOCAB, (LENGTH + 1,), generator=source)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (p.view(b, t, HEADS, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        heads = []
        for head in range(HEADS):
            scores = q[:, head] @ k[:, head].transpose(-1, -2) / math.sqrt(w // HEADS)
            mask = torch.ones(t, t, dtype=torch.bool).tril()
            scores = scores.masked_fill(~mask, -math.inf)
            heads.append(torch.softmax(scores, -1) @ v[:, head])
        mixed = torch.stack(heads, 1)
        return self.out(mixed.transpose(1, 2).reshape(b, t, w))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.drop = nn.Dropout(0.1)
    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.drop(self.mlp(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)
    def forward(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def main():
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    loader = iter(DataLoader(Text(), BATCH, shuffle=True))
    steps = 60
    for step in range(steps):
        optimizer.zero_grad(set_to_none=False)
        for micro in range(MICRO):
            batch = next(loader)
            x, y = batch[:, :-1], batch[:, 1:]
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) / MICRO
            loss.backward()
        optimizer.step()

if __name__ == "__main__":
    main()
"""

FALSE: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "skipped optimizer steps": (
        "samples",
        (("        optimizer.step()", "        if step % 2:\n            optimizer.step()"),),
    ),
    "update without effect": (
        "updates",
        (("lr=1e-3", "lr=0.0"),),
    ),
    "skipped micro-batches": ("samples", (("range(MICRO)", "range(1)"),)),
    "smaller batch": ("samples", (("BATCH, MICRO, LAYERS = 64, 32, 2, 16, 4",
                                   "BATCH, MICRO, LAYERS = 64, 32, 2, 16, 3"),)),
    "shorter sequences": ("samples", (("x, y = batch[:, :-1], batch[:, 1:]",
                                       "x, y = batch[:, :-5], batch[:, 1:-4]"),)),
    "repeated data": ("samples", (("manual_seed(index)", "manual_seed(index % 8)"),)),
    "no backward": ("flops", (("loss.backward()", "pass"),)),
    "detached subgraph": ("gradients", (("x = self.tokens(x)\n        for block in self.blocks:\n            x = block(x)",
                                     "x = self.tokens(x)\n        for block in self.blocks:\n            x = block(x).detach()"),)),
    "frozen layers": (
        "gradients",
        (("    steps = 60", "    steps = 60\n    model.blocks[0].requires_grad_(False)"),),
    ),
    "labels of half the tokens": ("gradients", (("F.cross_entropy(logits.flatten(0, 1), y.flatten())",
                                  "F.cross_entropy(logits[:, ::2].flatten(0, 1), y[:, ::2].flatten())"),)),
    "fewer layers": ("model", (("MICRO, LAYERS = 64, 32, 2, 16, 4, 2, 2",
                                "MICRO, LAYERS = 64, 32, 2, 16, 4, 2, 1"),)),
    "skipped layer": ("flops", (("for block in self.blocks:", "for block in self.blocks[:1]:"),)),
    "dropout off": ("randomness", (("nn.Dropout(0.1)", "nn.Dropout(0.0)"),)),
    "eval mode": ("randomness", (("    steps = 60", "    steps = 60\n    model.eval()"),)),
    "lower precision": (
        "gradients",
        (
            (
                "        x = self.tokens(x)\n",
                "        x = self.tokens(x)\n"
                "        x = x + ((x * 4).round() / 4 - x).detach()\n",
            ),
        ),
    ),
    "weights in bfloat16": (
        "model",
        (("    model = Model()", "    model = Model().bfloat16()"),),
    ),
    "accumulation dropped": (
        "samples",
        (("            loss.backward()\n        optimizer.step()",
          "            loss.backward()\n            optimizer.step()\n            optimizer.zero_grad()"),),
    ),
    "truncated vocabulary": (
        "flops",
        (("return self.head(x)",
          "return F.pad(F.linear(x, self.head.weight[:32], self.head.bias[:32]), (0, 32))"),),
    ),
    "gradients never cleared": (
        "gradients",
        (("        optimizer.zero_grad(set_to_none=False)\n", ""),),
    ),
    "early stop": ("steps", (("steps = 60", "steps = 12"),)),
    "head updated alone": (
        "updates",
        (("torch.optim.AdamW(model.parameters()", "torch.optim.AdamW(model.head.parameters()"),),
    ),
}  # fmt: skip
"""Criterion that refuses each, and the replacements that make it."""

TRUE: dict[str, tuple[tuple[str, str], ...]] = {
    "fused optimizer": (("foreach=False", "fused=True"),),
    "SDPA": (
        (SCRIPT[SCRIPT.index("        heads = []") : SCRIPT.index("        return self.out(mixed")],
         "        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"),
    ),
    "loader workers": (("BATCH, shuffle=True", "BATCH, shuffle=True, num_workers=1"),),
    "gradients set to None": (("set_to_none=False", "set_to_none=True"),),
    "batched heads": (
        (SCRIPT[SCRIPT.index("        heads = []") : SCRIPT.index("        return self.out(mixed")],
         "        scores = q @ k.transpose(-1, -2) / math.sqrt(w // HEADS)\n"
         "        mask = torch.ones(t, t, dtype=torch.bool).tril()\n"
         "        mixed = torch.softmax(scores.masked_fill(~mask, -math.inf), -1) @ v\n"),
    ),
    "bfloat16 autocast": (
        ("            logits = model(x)\n",
         '            with torch.autocast("cpu", torch.bfloat16):\n                logits = model(x)\n'),
    ),
}  # fmt: skip


def changed(replacements: tuple[tuple[str, str], ...]) -> str:
    text = SCRIPT
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    return text
