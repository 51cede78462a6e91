"""Stepscope in the Lightning Trainer: one line, and the verdict of a step.

    pip install 'stepscope[lightning]'
    python examples/callbacks_lightning.py --accelerate

Prints the verdict while the training runs, and writes stepscope-out/trainer.html.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stepscope.integrations import StepscopeLightningCallback

VOCAB, LENGTH, WIDTH = 1000, 64, 128


class LanguageModel(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.blocks(self.tokens(ids), mask=mask, is_causal=True))

    def training_step(self, batch: tuple[Tensor], index: int) -> Tensor:
        (ids,) = batch
        loss = nn.functional.cross_entropy(self(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        if index % 10 == 0:
            print(f"batch {index}: loss {loss.item():.9g}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--accelerate", action="store_true", help="use the fused layers")
    parser.add_argument("--no-callback", action="store_true", help="train without Stepscope")
    given = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    callback = StepscopeLightningCallback(accelerate=given.accelerate)
    trainer = lightning.Trainer(
        max_steps=given.steps,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if given.no_callback else [callback],
    )
    ids = torch.randint(VOCAB, (4096, LENGTH))
    trainer.fit(LanguageModel(), DataLoader(TensorDataset(ids), 8))


if __name__ == "__main__":
    main()
