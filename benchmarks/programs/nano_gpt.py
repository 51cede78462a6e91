"""A GPT with naive attention, weight tying, decayed and plain parameter groups, accumulation."""

from __future__ import annotations

import math

import torch
from common import log, options
from torch import Tensor, nn
from torch.nn import functional

ACCUMULATE = 2


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, length: int, sdpa: bool) -> None:
        super().__init__()
        self.heads, self.sdpa = heads, sdpa
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).bool())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2))
        if self.sdpa:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1])
            scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
            mixed = functional.softmax(scores, dim=-1) @ v
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, length: int, sdpa: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, length, sdpa)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(
        self, vocab: int, width: int, layers: int, heads: int, length: int, sdpa: bool
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads, length, sdpa) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    given = options(__doc__, "--bf16", "--tf32", "--sdpa", "--fused", "--compile")
    vocab, width, layers, heads, length, batch = (
        (50_304, 768, 12, 12, 1024, 4) if given.scale == "gpu" else (512, 128, 3, 4, 64, 4)
    )
    batch *= given.batch_factor
    model = GPT(vocab, width, layers, heads, length, given.sdpa).to(given.device)
    step_model = torch.compile(model) if given.compile else model
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=given.fused or None)
    text = torch.randint(vocab, (100_000,))
    for step in range(given.steps):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 10)
        for _ in range(ACCUMULATE):
            starts = torch.randint(len(text) - length - 1, (batch,)).tolist()
            tokens = torch.stack([text[at : at + length] for at in starts]).to(given.device)
            targets = torch.stack([text[at + 1 : at + 1 + length] for at in starts])
            targets = targets.to(given.device)
            with torch.autocast(given.device, torch.bfloat16, enabled=given.bf16):
                loss = step_model(tokens, targets) / ACCUMULATE
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log(given, step, loss * ACCUMULATE)


if __name__ == "__main__":
    main()
