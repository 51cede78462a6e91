"""LoRA fine-tuning of a Hugging Face Llama with PEFT: most parameters are frozen."""

from __future__ import annotations

from common import Tokens, log, options

# isort: split
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    given = options(__doc__, "--bf16", "--tf32", "--fused", "--compile")
    large = given.scale == "gpu"
    width, layers, heads, length, batch = (2048, 12, 16, 1024, 4) if large else (192, 4, 4, 128, 4)
    config = LlamaConfig(
        vocab_size=32_000 if large else 1000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=length,
        attn_implementation="sdpa",
        use_cache=False,
    )
    adapters = LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(LlamaForCausalLM(config), adapters).to(given.device)
    step_model = torch.compile(model) if given.compile else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=given.fused or None)
    tokens = Tokens(config.vocab_size, length, size=1 << 20)
    loader = iter(DataLoader(tokens, batch * given.batch_factor, num_workers=given.workers))
    for step in range(given.steps):
        examples = {name: value.to(given.device) for name, value in next(loader).items()}
        with torch.autocast(given.device, torch.bfloat16, enabled=given.bf16):
            loss = step_model(**examples).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(given, step, loss)


if __name__ == "__main__":
    main()
