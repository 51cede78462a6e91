"""A small classifier whose samples take longer to create than the training step."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE = 64


class Spectra(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(index))
        return torch.fft.fft2(noise).abs().flatten(), index % 10


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE * SIZE, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for inputs, targets in DataLoader(Spectra(), batch_size=32):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
