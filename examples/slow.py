"""A training loop with everything that makes one slow, as a first subject for `inspect`.

    stepscope inspect --stop-early examples/slow.py
    stepscope inspect --stop-early examples/slow.py --device cuda --layers 12 --width 768

Eager, float32, naive attention, an optimizer that loops over tensors in Python, a loss that is read
back in every step, and data that is created on the host and copied from pageable memory.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

VOCAB = 8192


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mask = torch.tril(torch.ones(length, length, device=x.device)) == 0
        weights = torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Model(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LoopingAdam(torch.optim.Optimizer):
    """Adam that loops over tensors and operators and allocates new tensors for everything."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 3e-4) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(parameter)
                    state["square"] = torch.zeros_like(parameter)
                state["step"] += 1
                gradient = parameter.grad
                state["mean"] = first * state["mean"] + (1 - first) * gradient
                state["square"] = second * state["square"] + (1 - second) * gradient * gradient
                mean = state["mean"] / (1 - first ** state["step"])
                square = state["square"] / (1 - second ** state["step"])
                parameter -= group["lr"] * mean / (square.sqrt() + group["eps"])


def build(
    layers: int = 2, width: int = 128, heads: int = 4, context: int = 64
) -> tuple[nn.Module, Callable[[int, torch.device], tuple[torch.Tensor, torch.Tensor]]]:
    """Entry point for `stepscope run own --model examples.slow:build`."""

    def make_batch(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(VOCAB, (size, context + 1))
        return text[:, :-1].to(device), text[:, 1:].to(device)

    return Model(layers, width, heads, context), make_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, make_batch = build(args.layers, args.width, args.heads, args.context)
    model.to(args.device)
    optimizer = LoopingAdam(model.parameters())
    for step in range(args.steps):
        tokens, targets = make_batch(args.batch, torch.device(args.device))
        loss = model(tokens, targets)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        value = loss.item()
        if step % 10 == 0:
            print(f"step {step}: loss {value:.4f}")


if __name__ == "__main__":
    main()
