"""How one quantity grows with another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fitted_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The power p of y ≈ c·x^p that fits best in logarithms."""
    if len(x) < 2 or min(x) <= 0 or min(y) <= 0:
        raise ValueError("an exponent needs at least two points, all above zero")
    slope, _ = np.polyfit(np.log(x), np.log(y), 1)
    return float(slope)
