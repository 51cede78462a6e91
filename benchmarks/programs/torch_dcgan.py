"""A DCGAN: two models, two optimizers, three backward passes in a step."""

from __future__ import annotations

import torch
from common import log, options
from torch import nn


def generator(noise: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(noise, 4 * width, 4, 1, 0, bias=False),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(True),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(True),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(True),
        nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def discriminator(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(2 * width, 4 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(4 * width),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(4 * width, 1, 4, 1, 0, bias=False),
        nn.Flatten(0),
    )


def main() -> None:
    given = options(__doc__, "--bf16", "--tf32", "--fused", "--compile")
    large = given.scale == "gpu"
    noise, width, batch = (100, 128, 256) if large else (32, 16, 16)
    batch *= given.batch_factor
    net_g = generator(noise, width).to(given.device)
    net_d = discriminator(width).to(given.device)
    call_g = torch.compile(net_g) if given.compile else net_g
    call_d = torch.compile(net_d) if given.compile else net_d
    criterion = nn.BCEWithLogitsLoss()
    fused = given.fused or None
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=fused)
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=fused)
    real = torch.full((batch,), 1.0, device=given.device)
    fake = torch.full((batch,), 0.0, device=given.device)
    for step in range(given.steps):
        images = torch.randn(batch, 3, 32, 32, device=given.device).tanh()
        net_d.zero_grad()
        with torch.autocast(given.device, torch.bfloat16, enabled=given.bf16):
            loss_real = criterion(call_d(images), real)
        loss_real.backward()
        with torch.autocast(given.device, torch.bfloat16, enabled=given.bf16):
            generated = call_g(torch.randn(batch, noise, 1, 1, device=given.device))
            loss_fake = criterion(call_d(generated.detach()), fake)
        loss_fake.backward()
        optimizer_d.step()
        net_g.zero_grad()
        with torch.autocast(given.device, torch.bfloat16, enabled=given.bf16):
            loss_g = criterion(call_d(generated), real)
        loss_g.backward()
        optimizer_g.step()
        log(given, step, loss_real + loss_fake + loss_g)


if __name__ == "__main__":
    main()
