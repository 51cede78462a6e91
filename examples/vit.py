"""A vision transformer built from torch.nn, trained from a DataLoader.

    stepscope inspect --stop-early examples/vit.py
    stepscope inspect --stop-early examples/vit.py --device cuda --width 768 --image 224 --patch 16

The images are noise, created one by one as a data set would read them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CLASSES = 10


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images of noise, created on access."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.size, self.size, generator=generator), index % CLASSES


class VisionTransformer(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.encoder(x).mean(dim=1))


def build(
    layers: int = 2, width: int = 64, heads: int = 2, image: int = 32, patch: int = 8
) -> tuple[
    nn.Module,
    Callable[[int, torch.device], torch.Tensor],
    Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
]:
    """Entry point for `stepscope run own --model examples.vit:build`."""

    def make_batch(size: int, device: torch.device) -> torch.Tensor:
        return torch.randn(size, 3, image, image, device=device)

    def loss(logits: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(len(images), device=images.device) % CLASSES
        return nn.functional.cross_entropy(logits, labels)

    return VisionTransformer(layers, width, heads, image, patch), make_batch, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--image", type=int, default=32)
    parser.add_argument("--patch", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, _, _ = build(args.layers, args.width, args.heads, args.image, args.patch)
    model.to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(
        Images(args.steps * args.batch, args.image),
        args.batch,
        shuffle=True,
        num_workers=args.workers,
    )
    for step, (images, labels) in enumerate(loader):
        loss = criterion(model(images.to(args.device)), labels.to(args.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
