"""Stepscope in the Hugging Face Trainer: one line, and the verdict of a step.

    pip install 'stepscope[hf]'
    python examples/callbacks_hf.py --accelerate

Prints the verdict while the training runs, and writes stepscope-out/trainer.html.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from stepscope.integrations import StepscopeCallback

VOCAB, LENGTH = 1000, 64


class RandomText(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--accelerate", action="store_true", help="use the fused layers")
    parser.add_argument("--no-callback", action="store_true", help="train without Stepscope")
    given = parser.parse_args()
    set_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=128,
        n_layer=2,
        n_head=4,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    callback = StepscopeCallback(accelerate=given.accelerate)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=given.steps,
                per_device_train_batch_size=8,
                use_cpu=not torch.cuda.is_available(),
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=RandomText(),
            callbacks=[] if given.no_callback else [callback],
        )
        print(f"loss {trainer.train().training_loss:.9g}")


if __name__ == "__main__":
    main()
