"""Optimizer-in-backward: every parameter has an optimizer, stepped by a hook of the backward."""

from __future__ import annotations

import torch
from common import log, options
from torch import Tensor, nn


def main() -> None:
    given = options(__doc__, "--bf16", "--tf32", "--compile")
    width, layers, batch = (2048, 12, 4096) if given.scale == "gpu" else (256, 4, 64)
    model = nn.Sequential(
        *(part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())),
        nn.Linear(width, 10),
    ).to(given.device)
    step_model = torch.compile(model) if given.compile else model
    optimizers = {p: torch.optim.AdamW([p], lr=1e-3, foreach=False) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(given.steps):
        x = torch.randn(batch * given.batch_factor, width, device=given.device)
        with torch.autocast(given.device, torch.bfloat16, enabled=given.bf16):
            loss = nn.functional.cross_entropy(step_model(x), x[:, :10].argmax(1))
        loss.backward()
        log(given, step, loss)


if __name__ == "__main__":
    main()
