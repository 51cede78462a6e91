"""A timm vision transformer with timm's optimizer and schedule; attention is already fused."""

from __future__ import annotations

from common import log, options

# isort: split
import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler


def main() -> None:
    given = options(__doc__, "--bf16", "--tf32", "--fused", "--compile")
    large = given.scale == "gpu"
    model = timm.create_model(
        "vit_base_patch16_224" if large else "vit_tiny_patch16_224",
        num_classes=10,
        **({} if large else {"img_size": 64, "depth": 4}),
    ).to(given.device)
    side, batch = (224, 128) if large else (64, 16)
    step_model = torch.compile(model) if given.compile else model
    fused = {"fused": True} if given.fused else {}
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, **fused)
    schedule = CosineLRScheduler(optimizer, t_initial=given.steps, t_in_epochs=False)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    for step in range(given.steps):
        labels = torch.randint(10, (batch * given.batch_factor,), device=given.device)
        noise = torch.randn(len(labels), 3, side, side, device=given.device)
        images = noise + labels[:, None, None, None] / 10
        with torch.autocast(given.device, torch.bfloat16, enabled=given.bf16):
            loss = criterion(step_model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step_update(step + 1)
        log(given, step, loss)


if __name__ == "__main__":
    main()
