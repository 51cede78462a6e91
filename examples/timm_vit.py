"""A vision transformer of timm in a loop of its own, before and after `stepscope.accelerate`.

python examples/timm_vit.py                 as it is
python examples/timm_vit.py --accelerate    on a GPU compiled, as a CUDA graph
python examples/timm_vit.py --accelerate --size real     ViT-B/16, batch 128, on a GPU
"""

from __future__ import annotations

import timm
import torch
from harness import Meter, options
from torch import Tensor, nn

import stepscope

MODELS = {
    "tiny": ("vit_tiny_patch16_224", {"img_size": 32, "depth": 2}),
    "real": ("vit_base_patch16_224", {}),
}
BATCHES = {"tiny": (4, 32), "real": (128, 224)}
CLASSES = 10


def images(count: int, side: int, step: int, device: str) -> tuple[Tensor, Tensor]:
    """Return noise whose mean depends on the class."""
    generator = torch.Generator(device).manual_seed(step)
    labels = torch.randint(CLASSES, (count,), generator=generator, device=device)
    noise = torch.randn(count, 3, side, side, generator=generator, device=device)
    return noise + labels[:, None, None, None] / CLASSES, labels


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    pictures, labels = batch
    return nn.functional.cross_entropy(model(pictures), labels, label_smoothing=0.1)


def main() -> None:
    args = options(__doc__)
    name, sizes = MODELS[args.size]
    count, side = BATCHES[args.size]
    model = timm.create_model(name, num_classes=CLASSES, **sizes).to(args.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    meter = Meter(args.device, "images", count)

    dtype = torch.bfloat16 if args.device == "cuda" else None

    if args.accelerate:
        report = stepscope.accelerate(model, optimizer)
        step = stepscope.TrainStep(
            model, optimizer, loss_fn=loss_of, max_grad_norm=1.0, dtype=dtype
        )

    for number in range(args.steps):
        batch = images(count, side, number, args.device)
        if args.accelerate:
            loss = step(batch)
        else:
            with torch.autocast(args.device, dtype, enabled=dtype is not None):
                loss = loss_of(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        meter.step(loss)

    print(meter)
    if args.accelerate:
        print(report)
        print(f"step: {step}")


if __name__ == "__main__":
    main()
