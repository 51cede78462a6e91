"""A decoder of torch.nn layers under lightning.Trainer: accumulation, clipping, a schedule."""

from __future__ import annotations

from common import Tokens, options

# isort: split
import argparse
import logging
import warnings
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")
ACCUMULATE = 2


class LanguageModel(lightning.LightningModule):
    def __init__(
        self, given: argparse.Namespace, vocab: int, width: int, layers: int, length: int
    ) -> None:
        super().__init__()
        self.given = given
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = self.tokens(tokens) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))

    def training_step(self, examples: dict[str, Tensor], index: int) -> Tensor:
        logits = self(examples["input_ids"])[:, :-1]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), examples["labels"][:, 1:].flatten()
        )
        if index % (ACCUMULATE * self.given.log_every) == 0:
            print(f"step {index // ACCUMULATE} loss {loss.item():.9g}")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4, fused=self.given.fused or None)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 10))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    given = options(__doc__, "--bf16", "--tf32", "--fused", "--compile")
    large = given.scale == "gpu"
    vocab, width, layers, length, batch = (
        (32_000, 1024, 8, 512, 16) if large else (1000, 128, 3, 64, 8)
    )
    model = LanguageModel(given, vocab, width, layers, length)
    if given.compile:
        model.compile()
    trainer = lightning.Trainer(
        max_steps=given.steps,
        accelerator="gpu" if given.device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if given.bf16 else "32-true",
        logger=False,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=None if given.fused else 1.0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = Tokens(vocab, length, size=1 << 20)
    trainer.fit(model, DataLoader(tokens, batch * given.batch_factor, num_workers=given.workers))


if __name__ == "__main__":
    main()
