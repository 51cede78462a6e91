"""A multilayer perceptron, or a small CNN with `--cnn`, under bfloat16 autocast on a CPU."""

from __future__ import annotations

import argparse

import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cnn", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.cnn:
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        )
        inputs = torch.randn(2, 3, 16, 16)
    else:
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        inputs = torch.randn(64, 64)
    targets = torch.arange(len(inputs)) % 10
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    while True:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
