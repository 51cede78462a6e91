"""Small models for tests of observed programs."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, CLASSES = 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Network(nn.Module):
    """Two blocks in a list, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def network() -> tuple[Network, torch.optim.Optimizer]:
    model = Network()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def network_flops(rows: int) -> int:
    """FLOPs of forward and backward; the first layer's input needs no gradient."""
    matmuls = [(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)] * 2 + [(WIDTH, CLASSES)]
    forward = sum(2 * rows * a * b for a, b in matmuls)
    first = 2 * rows * WIDTH * 2 * WIDTH
    return 3 * forward - first


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, WIDTH), torch.randint(CLASSES, (rows,))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 8) -> None:
    x, y = batch(rows)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
