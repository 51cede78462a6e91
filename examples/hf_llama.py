"""A Hugging Face Llama in a loop of its own, before and after `stepscope.accelerate`.

python examples/hf_llama.py                 as it is
python examples/hf_llama.py --accelerate    on a GPU compiled, as a CUDA graph
python examples/hf_llama.py --accelerate --size real     the shape of Llama 3.2 1B, on a GPU
"""

from __future__ import annotations

import torch
from harness import Meter, Tokens, options
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import stepscope

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256},
    "real": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256},
}  # fmt: skip
BATCHES = {"tiny": (4, 32), "real": (4, 2048)}


def main() -> None:
    args = options(__doc__)
    batch_size, length = BATCHES[args.size]
    config = LlamaConfig(
        **SIZES[args.size],
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(args.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, 5, args.steps)
    loader = DataLoader(Tokens(config.vocab_size, length), batch_size)
    meter = Meter(args.device, "tokens", batch_size * length)

    dtype = torch.bfloat16 if args.device == "cuda" else None

    if args.accelerate:
        report = stepscope.accelerate(model, optimizer)
        step = stepscope.TrainStep(
            model, optimizer, max_grad_norm=1.0, scheduler=schedule, dtype=dtype
        )

    for _, batch in zip(range(args.steps), loader, strict=False):
        if args.accelerate:
            loss = step(batch)
        else:
            batch = {name: tensor.to(args.device) for name, tensor in batch.items()}
            with torch.autocast(args.device, dtype, enabled=dtype is not None):
                loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        meter.step(loss)

    print(meter)
    if args.accelerate:
        print(report)
        print(f"step: {step}")


if __name__ == "__main__":
    main()
