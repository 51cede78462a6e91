"""A ResNet of torchvision, trained as in its classification reference: loader, SGD, accuracy."""

from __future__ import annotations

from common import Images, options

# isort: split
import argparse
import time
from collections import deque

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader


class SmoothedValue:
    """The median of the last values."""

    def __init__(self) -> None:
        self.window: deque[float] = deque(maxlen=20)

    def update(self, value: float) -> None:
        self.window.append(value)

    @property
    def median(self) -> float:
        return sorted(self.window)[len(self.window) // 2]


def accuracy(output: Tensor, target: Tensor) -> float:
    with torch.inference_mode():
        return (output.argmax(1) == target).float().mean().item()


def train_one_epoch(
    given: argparse.Namespace,
    model: nn.Module,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[Tensor, int]],
    begin: int,
) -> int:
    model.train()
    losses, took = SmoothedValue(), SmoothedValue()
    step = begin
    for image, target in loader:
        start = time.time()
        image, target = image.to(given.device), target.to(given.device)
        with torch.autocast(given.device, torch.bfloat16, enabled=given.bf16):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.update(loss.item())
        took.update(time.time() - start)
        correct = accuracy(output, target)
        if step % given.log_every == 0:
            print(
                f"step {step} loss {losses.window[-1]:.9g} median {losses.median:.9g}"
                f" acc1 {correct:.3f}"
            )
        step += 1
        if step == given.steps:
            break
    return step


def main() -> None:
    given = options(__doc__, "--bf16", "--tf32", "--fused", "--compile")
    large = given.scale == "gpu"
    side, batch, workers = (224, 64, 8) if large else (64, 8, 0)
    loader = DataLoader(
        Images(side),
        batch * given.batch_factor,
        shuffle=True,
        num_workers=workers,
        pin_memory=large,
        drop_last=True,
    )
    model = (torchvision.models.resnet50 if large else torchvision.models.resnet18)(num_classes=10)
    model.to(given.device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=given.fused or None
    )
    step_model = torch.compile(model) if given.compile else model
    step = 0
    while step < given.steps:
        step = train_one_epoch(given, step_model, criterion, optimizer, loader, step)


if __name__ == "__main__":
    main()
