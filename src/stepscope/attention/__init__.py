"""Attention: one call, several implementations, and what each costs. Loads without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.attention.api import attention
from stepscope.attention.registry import (
    IMPLEMENTATION_NAMES,
    IMPLEMENTATIONS,
    AttentionFunction,
    Implementation,
    implementation,
)

if TYPE_CHECKING:
    from stepscope.attention.reference import reference_attention

__all__ = [
    "IMPLEMENTATIONS",
    "IMPLEMENTATION_NAMES",
    "AttentionFunction",
    "Implementation",
    "attention",
    "implementation",
    "reference_attention",
]


def __getattr__(name: str) -> Any:
    if name == "reference_attention":
        from stepscope.attention.reference import reference_attention

        return reference_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
