"""Classes of kernels and operators."""

from __future__ import annotations

from typing import Literal, get_args

Class = Literal[
    "matmul",
    "attention",
    "softmax",
    "reduction",
    "elementwise",
    "copy/cast",
    "optimizer",
    "communication",
    "other",
]
CLASSES: tuple[Class, ...] = get_args(Class)
MEMORY_BOUND: tuple[Class, ...] = ("elementwise", "reduction", "softmax", "copy/cast")
"""Classes of memory-bound kernels."""
