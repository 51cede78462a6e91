"""Sine waves predicted by two LSTM cells in float64 with L-BFGS: many forwards in one step."""

from __future__ import annotations

import torch
from common import log, options
from torch import Tensor, nn


class Sequence(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.lstm1, self.lstm2 = nn.LSTMCell(1, width), nn.LSTMCell(width, width)
        self.linear = nn.Linear(width, 1)

    def forward(self, series: Tensor) -> Tensor:
        outputs = []
        h1, c1, h2, c2 = (series.new_zeros(len(series), self.width) for _ in range(4))
        for part in series.split(1, dim=1):
            h1, c1 = self.lstm1(part, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


def main() -> None:
    given = options(__doc__, "--tf32")
    width, length, batch = (256, 50, 512) if given.scale == "gpu" else (32, 10, 16)
    shift = torch.randint(-80, 80, (batch * given.batch_factor, 1))
    waves = torch.sin((torch.arange(length + 1) + shift) / 20.0).double().to(given.device)
    model = Sequence(width).double().to(given.device)
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for step in range(given.steps):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = criterion(model(waves[:, :-1]), waves[:, 1:])
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        log(given, step, loss)


if __name__ == "__main__":
    main()
