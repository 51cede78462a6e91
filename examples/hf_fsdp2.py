"""The Hugging Face Trainer with FSDP2 under torchrun, observed on every rank by the callback.

    torchrun --nproc-per-node 8 examples/hf_fsdp2.py --size real
    torchrun --nproc-per-node 8 examples/hf_fsdp2.py --size real --accelerate
    torchrun --nproc-per-node 2 examples/hf_fsdp2.py --device cpu
    stepscope trace stepscope-out/observer

`fsdp_version: 2` in `fsdp_config` selects FSDP2. Metrics go to the integrations in `report_to`.
"""

from __future__ import annotations

import tempfile

import torch.distributed as dist
from harness import Tokens, options
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import stepscope
from stepscope.integrations import StepscopeCallback

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
    config = LlamaConfig(**SIZES[args.size], max_position_embeddings=length, use_cache=False)
    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM(config)
        if args.accelerate:
            report = stepscope.accelerate(model, compile=True)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=args.steps,
                per_device_train_batch_size=batch_size,
                bf16=args.device == "cuda",
                use_cpu=args.device == "cpu",
                fsdp="full_shard auto_wrap",
                fsdp_config={
                    "fsdp_version": 2,
                    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                },
                save_strategy="no",
                logging_steps=10,
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Tokens(config.vocab_size, length),
            data_collator=default_data_collator,
            callbacks=[StepscopeCallback(observe=True)],
        )
        result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"mean loss {result.training_loss:.4f}")
        if args.accelerate:
            print(report)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
