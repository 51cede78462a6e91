"""Stepscope in a loop with Hugging Face Accelerate: one line, and the verdict of a step.

    pip install 'stepscope[hf]'
    python examples/callbacks_accelerate.py --accelerate

Prints the verdict while the training runs, and writes stepscope-out/trainer.html.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from stepscope.integrations import StepscopeAccelerateHook

VOCAB, LENGTH = 1000, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--accelerate", action="store_true", help="use the fused layers")
    parser.add_argument("--no-callback", action="store_true", help="train without Stepscope")
    given = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=LENGTH,
            n_embd=128,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = DataLoader(TensorDataset(torch.randint(VOCAB, (4096, LENGTH))), 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    hook = None
    if not given.no_callback:
        hook = StepscopeAccelerateHook(accelerator, model, optimizer, accelerate=given.accelerate)
    step = 0
    for (ids,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.9g}")
            step += 1
        if step == given.steps:
            break
    if hook is not None:
        hook.close()


if __name__ == "__main__":
    main()
