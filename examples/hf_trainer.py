"""A Hugging Face Qwen2 under `transformers.Trainer`, before and after `stepscope.accelerate`.

    python examples/hf_trainer.py                 as it is
    python examples/hf_trainer.py --accelerate    one more line
    python examples/hf_trainer.py --accelerate --size real     the shape of Qwen2 0.5B, on a GPU

`accelerate` is called before the `Trainer` is made, which wraps the model's forward in autocast.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from harness import Meter, Tokens, options
from torch import Tensor
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import stepscope

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256},
    "real": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936},
}  # fmt: skip
BATCHES = {"tiny": (4, 32), "real": (4, 2048)}


class MeteredTrainer(Trainer):
    """A `Trainer` whose steps are measured."""

    meter: Meter

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.meter.step(loss)
        return loss


def main() -> None:
    args = options(__doc__)
    batch_size, length = BATCHES[args.size]
    config = Qwen2Config(
        **SIZES[args.size],
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = Qwen2ForCausalLM(config).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    if args.accelerate:
        report = stepscope.accelerate(model, optimizer)

    with tempfile.TemporaryDirectory() as folder:
        trainer = MeteredTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=args.steps,
                per_device_train_batch_size=batch_size,
                bf16=args.device == "cuda",
                use_cpu=args.device == "cpu",
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Tokens(config.vocab_size, length),
            data_collator=default_data_collator,
            optimizers=(optimizer, None),
        )
        trainer.meter = Meter(args.device, "tokens", batch_size * length)
        trainer.train()

    print(trainer.meter)
    if args.accelerate:
        print(report)


if __name__ == "__main__":
    main()
