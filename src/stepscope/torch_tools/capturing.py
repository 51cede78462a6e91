"""CUDA graph captures."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """Return whether the current CUDA stream records a graph. CUDA is not initialized for it."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()
