"""A Hugging Face Llama in a custom loop: float32, eager attention, AdamW, clipping."""

from __future__ import annotations

from common import Tokens, log, options

# isort: split
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup


def main() -> None:
    given = options(__doc__, "--bf16", "--tf32", "--sdpa", "--fused", "--compile")
    large = given.scale == "gpu"
    width, layers, heads, length, batch = (1024, 12, 16, 1024, 8) if large else (128, 4, 4, 128, 4)
    length = given.length or length
    config = LlamaConfig(
        vocab_size=32_000 if large else 1000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=length,
        attn_implementation="sdpa" if given.sdpa else "eager",
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(given.device)
    model.train()
    step_model = torch.compile(model) if given.compile else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, weight_decay=0.1, fused=given.fused or None
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, 10, given.steps)
    loader = DataLoader(
        Tokens(config.vocab_size, length),
        batch * given.batch_factor,
        shuffle=True,
        num_workers=given.workers,
    )
    step = 0
    while step < given.steps:
        for examples in loader:
            examples = {name: value.to(given.device) for name, value in examples.items()}
            with torch.autocast(given.device, torch.bfloat16, enabled=given.bf16):
                loss = step_model(**examples).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            log(given, step, loss)
            step += 1
            if step == given.steps:
                break


if __name__ == "__main__":
    main()
