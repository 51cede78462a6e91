"""A residual MLP under DistributedDataParallel; start it with torchrun."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from common import log, options
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.net = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(self.norm(x))


def main() -> None:
    given = options(__doc__, "--bf16", "--fused")
    large = given.scale == "gpu"
    width, layers, batch = (2048, 8, 1024) if large else (128, 3, 64)
    on_gpu = given.device == "cuda"
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = nn.Sequential(*(Residual(width) for _ in range(layers)), nn.Linear(width, 10))
    model = DistributedDataParallel(model.to(given.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=given.fused or None)
    torch.manual_seed(rank)
    for step in range(given.steps):
        x = torch.randn(batch * given.batch_factor, width, device=given.device)
        target = x[:, :10].argmax(1)
        with torch.autocast(given.device, torch.bfloat16, enabled=given.bf16):
            loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            log(given, step, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
