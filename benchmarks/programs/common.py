"""The command line that all programs share, and their synthetic data."""

from __future__ import annotations

import argparse
import fcntl
import os

import torch
from torch import Tensor
from torch.utils.data import Dataset

# Every model is built from its configuration; nothing is downloaded.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SWITCHES = {
    "--bf16": "bfloat16 autocast",
    "--tf32": "TF32 matmuls",
    "--sdpa": "scaled_dot_product_attention instead of eager attention",
    "--fused": "the optimizer's fused implementation",
    "--compile": "torch.compile",
}


def options(description: str | None, *switches: str) -> argparse.Namespace:
    """Parse the command line; `switches` are the ones of `SWITCHES` that the program has."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", choices=("cpu", "gpu"), default="cpu", help="size of the model")
    parser.add_argument("--steps", type=int, default=34)
    parser.add_argument("--log-every", type=int, default=5)
    parser.add_argument("--batch-factor", type=int, default=1, help="multiplies the batch size")
    parser.add_argument("--workers", type=int, default=0, help="workers of a DataLoader")
    parser.add_argument("--length", type=int, help="tokens of a sequence, in a language model")
    for switch in switches:
        parser.add_argument(switch, action="store_true", help=SWITCHES[switch])
    given = parser.parse_args()
    for switch in SWITCHES:
        vars(given).setdefault(switch.removeprefix("--"), False)
    torch.manual_seed(0)
    _wait_for_turn()
    if given.tf32:
        torch.set_float32_matmul_precision("high")
    return given


def _wait_for_turn() -> None:
    """Wait until `advice_blocks.py` lets the program use the device: its libraries are imported."""
    if path := os.environ.get("STEPSCOPE_GATE"):
        fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX)


def log(given: argparse.Namespace, step: int, loss: Tensor) -> None:
    """Print the loss every few steps."""
    if step % given.log_every == 0 or step == given.steps - 1:
        print(f"step {step} loss {loss.item():.9g}")


class Tokens(Dataset[dict[str, Tensor]]):
    """Random sequences, each followed by itself, so that a language model can learn them."""

    def __init__(self, vocab: int, length: int, size: int = 4096) -> None:
        self.vocab, self.length, self.size = vocab, length, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        source = torch.Generator().manual_seed(index)
        half = torch.randint(self.vocab, (self.length // 2,), generator=source)
        tokens = torch.cat([half, half])
        return {"input_ids": tokens, "labels": tokens.clone()}


class Images(Dataset[tuple[Tensor, int]]):
    """Noise with a class-dependent mean."""

    def __init__(self, side: int, classes: int = 10, channels: int = 3, size: int = 4096) -> None:
        self.shape, self.classes, self.size = (channels, side, side), classes, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % self.classes
        source = torch.Generator().manual_seed(index)
        return torch.randn(self.shape, generator=source) + label / self.classes, label
