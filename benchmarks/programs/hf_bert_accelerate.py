"""A Hugging Face BERT for sequence classification with Accelerate: padded batches, accumulation."""

from __future__ import annotations

from common import log, options

# isort: split
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

ACCUMULATE = 2


def main() -> None:
    given = options(__doc__, "--bf16", "--tf32", "--fused", "--compile")
    large = given.scale == "gpu"
    width, layers, heads, length, batch = (768, 12, 12, 256, 32) if large else (128, 3, 4, 64, 8)
    config = BertConfig(
        vocab_size=30_000 if large else 1000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=length,
        num_labels=2,
    )
    accelerator = Accelerator(
        mixed_precision="bf16" if given.bf16 else "no",
        cpu=given.device == "cpu",
        gradient_accumulation_steps=ACCUMULATE,
    )
    lengths = torch.randint(length // 2, length + 1, (2048,))
    tokens = torch.randint(config.vocab_size, (2048, length))
    mask = (torch.arange(length) < lengths[:, None]).long()
    labels = (tokens[:, 0] > config.vocab_size // 2).long()
    loader = DataLoader(
        TensorDataset(tokens, mask, labels),
        batch * given.batch_factor,
        shuffle=True,
        num_workers=given.workers,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=given.fused or None)
    schedule = get_linear_schedule_with_warmup(optimizer, 10, given.steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    step_model = torch.compile(model) if given.compile else model
    model.train()
    step = 0
    while step < given.steps:
        for tokens, mask, labels in loader:
            with accelerator.accumulate(model):
                loss = step_model(input_ids=tokens, attention_mask=mask, labels=labels).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                log(given, step, loss)
                step += 1
            if step == given.steps:
                break


if __name__ == "__main__":
    main()
