"""A variational autoencoder; its loss is read back in every step, as the example does."""

from __future__ import annotations

import torch
from common import log, options
from torch import Tensor, nn
from torch.nn import functional


class VAE(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, width)
        self.fc21, self.fc22 = nn.Linear(width, 20), nn.Linear(width, 20)
        self.fc3 = nn.Linear(20, width)
        self.fc4 = nn.Linear(width, 784)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = functional.relu(self.fc1(x))
        mean, log_variance = self.fc21(hidden), self.fc22(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.fc4(functional.relu(self.fc3(z))), mean, log_variance


def main() -> None:
    given = options(__doc__, "--bf16", "--tf32", "--fused", "--compile")
    width, batch = (8192, 8192) if given.scale == "gpu" else (1024, 128)
    model = VAE(width).to(given.device)
    step_model = torch.compile(model) if given.compile else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=given.fused or None)
    total = 0.0
    for step in range(given.steps):
        x = torch.rand(batch * given.batch_factor, 784, device=given.device)
        optimizer.zero_grad()
        with torch.autocast(given.device, torch.bfloat16, enabled=given.bf16):
            decoded, mean, log_variance = step_model(x)
            error = functional.binary_cross_entropy_with_logits(decoded, x, reduction="sum")
            divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
            loss = (error + divergence) / len(x)
        loss.backward()
        total += loss.item()
        optimizer.step()
        log(given, step, loss)
    print(f"mean loss {total / given.steps:.9g}")


if __name__ == "__main__":
    main()
