"""A timm ConvNeXt with an exponential moving average of its weights."""

from __future__ import annotations

from common import log, options

# isort: split
import timm
import torch
from timm.utils import ModelEmaV3


def main() -> None:
    given = options(__doc__, "--bf16", "--tf32", "--fused", "--compile")
    large = given.scale == "gpu"
    model = timm.create_model(
        "convnext_tiny" if large else "convnext_atto", num_classes=10, drop_path_rate=0.1
    ).to(given.device)
    side, batch = (224, 64) if large else (32, 8)
    step_model = torch.compile(model) if given.compile else model
    average = ModelEmaV3(model, decay=0.999)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=given.fused or None)
    criterion = torch.nn.CrossEntropyLoss()
    for step in range(given.steps):
        labels = torch.randint(10, (batch * given.batch_factor,), device=given.device)
        noise = torch.randn(len(labels), 3, side, side, device=given.device)
        images = noise + labels[:, None, None, None] / 10
        with torch.autocast(given.device, torch.bfloat16, enabled=given.bf16):
            loss = criterion(step_model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model, step=step)
        log(given, step, loss)


if __name__ == "__main__":
    main()
