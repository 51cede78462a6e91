"""A Hugging Face vision transformer: eager attention, AdamW, a batch created on the device."""

from __future__ import annotations

from common import log, options

# isort: split
import torch
from transformers import ViTConfig, ViTForImageClassification


def main() -> None:
    given = options(__doc__, "--bf16", "--tf32", "--sdpa", "--fused", "--compile")
    large = given.scale == "gpu"
    width, layers, heads, side, batch = (768, 12, 12, 224, 64) if large else (96, 4, 4, 64, 16)
    config = ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        image_size=side,
        patch_size=16 if large else 8,
        num_labels=10,
        attn_implementation="sdpa" if given.sdpa else "eager",
    )
    model = ViTForImageClassification(config).to(given.device).train()
    step_model = torch.compile(model) if given.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=given.fused or None)
    for step in range(given.steps):
        labels = torch.randint(10, (batch * given.batch_factor,), device=given.device)
        noise = torch.randn(len(labels), 3, side, side, device=given.device)
        with torch.autocast(given.device, torch.bfloat16, enabled=given.bf16):
            pixels = noise + labels[:, None, None, None] / 10
            loss = step_model(pixel_values=pixels, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        log(given, step, loss)


if __name__ == "__main__":
    main()
