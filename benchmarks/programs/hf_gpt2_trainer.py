"""A Hugging Face GPT-2 under transformers.Trainer."""

from __future__ import annotations

from common import Tokens, options

# isort: split
import tempfile
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_callback import PrinterCallback


class PrintLoss(TrainerCallback):
    """Prints only the loss: the other entries of the log are times."""

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            print(f"step {state.global_step - 1} loss {float(logs['loss']):.9g}")


def main() -> None:
    given = options(__doc__, "--bf16", "--tf32", "--fused", "--compile")
    large = given.scale == "gpu"
    width, layers, heads, length, batch = (768, 12, 12, 1024, 8) if large else (128, 3, 4, 128, 4)
    vocab = 50_257 if large else 1000
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=given.steps,
                logging_steps=given.log_every,
                per_device_train_batch_size=batch * given.batch_factor,
                learning_rate=3e-4,
                optim="adamw_torch_fused" if given.fused else "adamw_torch",
                bf16=given.bf16,
                torch_compile=given.compile,
                use_cpu=given.device == "cpu",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Tokens(vocab, length),
            data_collator=default_data_collator,
            callbacks=[PrintLoss()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
