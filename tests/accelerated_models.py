"""Small models for tests of `stepscope.accelerate`, and a comparison of their training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from stepscope.acceleration.report import Report

WIDTH, HIDDEN, VOCAB = 16, 40, 50
COMPILED = {"compiler": "aot_eager", "form": "compiled with passes"}
"""Options of `accelerate(…, compile=)`: the graph with our passes, run without Inductor."""


class Norm(nn.Module):
    """RMSNorm as Hugging Face writes it."""

    def __init__(self, width: int = WIDTH, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x.float() * inverse).to(x.dtype)


class Gated(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = functional.silu) -> None:
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module] = Norm, mlp: type[nn.Module] = Gated) -> None:
        super().__init__()
        self.norm, self.mlp = norm(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


class OwnLinear(nn.Module):
    """A linear layer as the CS336 assignments ask for."""

    def __init__(self, inputs: int = WIDTH, outputs: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class OwnGated(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.w1, self.w3 = OwnLinear(width, hidden), OwnLinear(width, hidden)
        self.w2 = OwnLinear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x)
        out: Tensor = self.w2(gate * torch.sigmoid(gate) * self.w3(x))
        return out


class OwnEmbedding(nn.Module):
    def __init__(self, rows: int = VOCAB, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width))

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids]


class OwnModel(nn.Module):
    """A language model whose every layer is of its own class."""

    def __init__(
        self,
        table: Callable[[int, int], nn.Module] = OwnEmbedding,
        vocab: int = VOCAB,
        width: int = WIDTH,
        hidden: int = HIDDEN,
    ) -> None:
        super().__init__()
        self.embed, self.head = table(vocab, width), OwnLinear(width, vocab)
        self.blocks = nn.ModuleList(
            Block(lambda: Norm(width), lambda: OwnGated(width, hidden))  # type: ignore[arg-type,return-value]
            for _ in range(2)
        )
        self.norm = Norm(width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def batch(seed: int = 0, length: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (2, 2, length), generator=generator)
    return tokens[0], tokens[1]


def created(block: Callable[[], nn.Module] = Block) -> Model:
    torch.manual_seed(0)
    return Model(block)


def losses(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 5,
    between: Callable[[int], None] = lambda _: None,
) -> list[float]:
    # The same dropout in every model.
    torch.manual_seed(0)
    values = []
    for step in range(steps):
        between(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*batch(step, length=4 + step % 2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(float(loss.detach()))
    return values


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def accelerated(model: nn.Module, **how: Any) -> Report:
    """Accelerate a model by the graph, and run it once."""
    report = stepscope.accelerate(model, compile=COMPILED, **how)
    with torch.autocast("cpu", torch.bfloat16):
        model(*batch())
    return report
