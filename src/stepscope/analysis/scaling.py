"""Growth of one quantity with another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fitted_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Fit y ≈ c·x^p in logarithms and return p."""
    if len(x) < 2 or min(x) <= 0 or min(y) <= 0:
        raise ValueError("an exponent needs at least two points, all above zero")
    slope, _ = np.polyfit(np.log(x), np.log(y), 1)
    return float(slope)
