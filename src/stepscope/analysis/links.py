"""Model of a link between ranks: a latency per message and a bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast")


def bus_factor(collective: str, ranks: int) -> float:
    """Bytes over the slowest link per byte of the message, as nccl-tests counts them."""
    if collective == "broadcast":
        return 1.0
    return (2 if collective == "all-reduce" else 1) * (ranks - 1) / ranks


class Link(NamedTuple):
    """t = latency + bytes / bandwidth."""

    latency_ms: float
    bytes_per_ms: float
    residual: float
    """Largest relative deviation of a measured time from the line."""


def fit_link(sizes: Sequence[float], times_ms: Sequence[float]) -> Link | None:
    """Fit the line with the smallest relative errors; None if it does not rise with the size."""
    if len(set(sizes)) < 2:
        return None
    x, t = np.asarray(sizes, dtype=float), np.asarray(times_ms, dtype=float)
    rows = np.stack([1 / t, x / t], axis=1)
    latency, per_byte = np.linalg.lstsq(rows, np.ones_like(t), rcond=None)[0]
    if latency < 0:
        latency, per_byte = 0.0, float(np.sum(x / t) / np.sum((x / t) ** 2))
    if per_byte <= 0:
        return None
    residual = np.abs((latency + per_byte * x) / t - 1).max()
    return Link(float(latency), float(1 / per_byte), float(residual))
