"""A convolutional network under lightning.Trainer: the optimizer steps with a closure."""

from __future__ import annotations

from common import Images, options

# isort: split
import argparse
import logging
import warnings

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Classifier(lightning.LightningModule):
    def __init__(self, given: argparse.Namespace, width: int) -> None:
        super().__init__()
        self.given = given
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 4 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, 10),
        )

    def training_step(self, examples: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = examples
        loss = nn.functional.cross_entropy(self.net(images), labels)
        if index % self.given.log_every == 0:
            print(f"step {index} loss {loss.item():.9g}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=self.given.fused or None)


def main() -> None:
    given = options(__doc__, "--bf16", "--tf32", "--fused", "--compile")
    large = given.scale == "gpu"
    side, batch, width = (128, 256, 64) if large else (32, 32, 16)
    model = Classifier(given, width)
    if given.compile:
        model.net.compile()
    trainer = lightning.Trainer(
        max_steps=given.steps,
        accelerator="gpu" if given.device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if given.bf16 else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(
        Images(side, size=1 << 20),
        batch * given.batch_factor,
        num_workers=12 if large else 0,
        persistent_workers=large,
    )
    trainer.fit(model, loader)


if __name__ == "__main__":
    main()
