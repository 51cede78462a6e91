"""Real text for training: the sources of Python's standard library, byte by byte. Loads without
torch."""

from __future__ import annotations

import os
import sysconfig
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VOCAB = 256
"""Tokens are bytes."""
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@cache
def library_text() -> bytes:
    """Return the sources, one file after the other, in a fixed order."""
    parts: list[bytes] = []
    for folder, inner, files in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = sorted(set(inner) - _LEFT_OUT)
        sources = sorted(name for name in files if name.endswith(".py"))
        parts += [Path(folder, name).read_bytes() for name in sources]
    return b"\n".join(parts)


class TextBatches:
    """Batches of random windows of the text; the same seed and index give the same batch."""

    def __init__(self, batch: int, context: int, seed: int, device: torch.device) -> None:
        import torch

        text = torch.frombuffer(bytearray(library_text()), dtype=torch.uint8)
        self._text = text.to(device)
        self._shape, self._seed = (batch, context), seed

    def __call__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and targets, int64, each of shape (batch, context)."""
        import torch

        batch, context = self._shape
        # Drawn on the CPU, so that every device reads the same windows.
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        starts = torch.randint(len(self._text) - context, (batch, 1), generator=generator)
        positions = starts.to(self._text.device) + torch.arange(
            context + 1, device=self._text.device
        )
        rows = self._text[positions].long()
        return rows[:, :-1], rows[:, 1:]
