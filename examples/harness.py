"""The command line, the data and the measurements that the examples of `accelerate` share."""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch
from torch import Tensor

WARM_UP = 8
"""Steps before the first timed one: comparisons, warm-up and capture of a CUDA graph."""


def options(description: str | None) -> argparse.Namespace:
    """Parse the flags: with and without `--accelerate` the same model trains on the same data."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--accelerate", action="store_true", help="use stepscope.accelerate")
    parser.add_argument("--size", choices=("tiny", "real"), default="tiny", help="real: for a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    torch.manual_seed(0)
    return parser.parse_args()


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random sequences whose second half repeats the first, so that there is something to learn."""

    def __init__(self, vocab: int, length: int) -> None:
        self.vocab, self.length = vocab, length

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        half = torch.randint(self.vocab, (self.length // 2,), generator=generator)
        tokens = torch.cat([half, half])
        return {"input_ids": tokens, "labels": tokens}


class Meter:
    """Step time, throughput, peak memory and loss of a training loop.

        meter = Meter(device, "tokens", batch * length)
        for batch in loader:
            ...
            meter.step(loss)
        print(meter)

    Steps are not synchronized with the host: the time is the mean of all steps after the first few.
    """

    def __init__(self, device: str | torch.device, unit: str, per_step: int) -> None:
        self._device = torch.device(device)
        self._unit, self._per_step = unit, per_step
        self._losses: list[Tensor] = []
        self._started = 0.0

    def step(self, loss: Any) -> None:
        """Count a step that ended."""
        self._losses.append(torch.as_tensor(loss).detach())
        if len(self._losses) == WARM_UP:
            self._started = self._now()

    def __str__(self) -> str:
        count = len(self._losses) - WARM_UP
        if count < 1:
            return f"fewer than {WARM_UP + 1} steps"
        seconds = (self._now() - self._started) / count
        first, last = (float(self._losses[index]) for index in (0, -1))
        return (
            f"loss {first:.4f} at first, {last:.4f} at last\n"
            f"step {1e3 * seconds:.2f} ms, {self._per_step / seconds:,.0f} {self._unit}/s\n"
            f"peak memory {self._peak_bytes() / 2**30:.2f} GiB"
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _peak_bytes(self) -> int:
        """Peak of the device's tensors; on a CPU, of the process."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
