"""The model of nano_gpt.py under `lightning.Trainer`, before and after `stepscope.accelerate`.

python examples/lightning_gpt.py                 as it is
python examples/lightning_gpt.py --accelerate    one more line, in configure_optimizers
python examples/lightning_gpt.py --accelerate --size real     the shape of GPT-2, on a GPU
"""

from __future__ import annotations

import logging
from typing import Any

import lightning
import torch
from harness import Meter, Tokens, options
from torch import Tensor
from torch.utils.data import DataLoader

import stepscope
from nano_gpt import GPT
from stepscope.acceleration.report import Report

SIZES = {
    "tiny": {"layers": 2, "width": 64, "heads": 4, "context": 32, "vocab": 256},
    "real": {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocab": 50_304},
}
BATCH = {"tiny": 4, "real": 8}


class LanguageModel(lightning.LightningModule):
    def __init__(self, gpt: GPT, meter: Meter, accelerate: bool) -> None:
        super().__init__()
        self.gpt, self.meter, self.accelerate = gpt, meter, accelerate
        self.report: Report | None = None

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        tokens = batch["input_ids"]
        loss: Tensor
        loss, _logits = self.gpt(tokens[:, :-1], tokens[:, 1:])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
        if self.accelerate:
            self.report = stepscope.accelerate(self.gpt, optimizer)
        return optimizer

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.meter.step(outputs["loss"])


def main() -> None:
    args = options(__doc__)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    size, batch_size = SIZES[args.size], BATCH[args.size]
    meter = Meter(args.device, "tokens", batch_size * size["context"])
    model = LanguageModel(GPT(**size), meter, args.accelerate)
    trainer = lightning.Trainer(
        max_steps=args.steps,
        accelerator="gpu" if args.device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if args.device == "cuda" else "32-true",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # One token more than the context: the targets are the tokens after the first.
    tokens = Tokens(size["vocab"], size["context"] + 2)
    trainer.fit(model, DataLoader(tokens, batch_size, collate_fn=_collated))
    print(meter)
    if model.report is not None:
        print(model.report)


def _collated(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {"input_ids": torch.stack([one["input_ids"][:-1] for one in examples])}


if __name__ == "__main__":
    main()
