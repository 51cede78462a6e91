"""A small convolutional network on digits, with Adadelta and a test pass after every epoch."""

from __future__ import annotations

import argparse

import torch
from common import Images, log, options
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

EPOCH = 64
"""Steps per epoch."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = self.dropout1(functional.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(functional.relu(self.fc1(x)))
        return functional.log_softmax(self.fc2(x), dim=1)


def evaluate(given: argparse.Namespace, model: nn.Module, loader: DataLoader) -> None:
    model.eval()
    total = correct = 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(given.device), labels.to(given.device)
            predicted = model(images).argmax(1)
            correct += (predicted == labels).sum().item()
            total += len(labels)
    print(f"accuracy {correct / total:.4f}")
    model.train()


def main() -> None:
    given = options(__doc__, "--bf16", "--tf32", "--compile")
    batch = (1024 if given.scale == "gpu" else 32) * given.batch_factor
    model = Net().to(given.device)
    step_model = torch.compile(model) if given.compile else model
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    images = Images(28, channels=1, size=EPOCH * batch)
    loader = DataLoader(images, batch, shuffle=True, num_workers=given.workers)
    test = DataLoader(Images(28, channels=1, size=4 * batch), batch)
    step = 0
    while step < given.steps:
        for images, labels in loader:
            images, labels = images.to(given.device), labels.to(given.device)
            optimizer.zero_grad()
            with torch.autocast(given.device, torch.bfloat16, enabled=given.bf16):
                loss = functional.nll_loss(step_model(images), labels)
            loss.backward()
            optimizer.step()
            log(given, step, loss)
            step += 1
            if step == given.steps:
                break
        evaluate(given, model, test)
        schedule.step()


if __name__ == "__main__":
    main()
