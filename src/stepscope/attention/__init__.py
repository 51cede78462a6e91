"""Attention: one function, several implementations and their cost model. Imports without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepscope.attention.registry import (
    IMPLEMENTATION_NAMES,
    IMPLEMENTATIONS,
    AttentionFunction,
    Implementation,
    implementation,
)
from stepscope.attention.rules import ScoreRules

if TYPE_CHECKING:
    from stepscope.attention.api import Explanation, attention, explain
    from stepscope.attention.ops import FlashAttentionTriton
    from stepscope.attention.reference import reference_attention
    from stepscope.attention.tiled import FlashAttentionTorch

__all__ = [
    "IMPLEMENTATIONS",
    "IMPLEMENTATION_NAMES",
    "AttentionFunction",
    "Explanation",
    "FlashAttentionTorch",
    "FlashAttentionTriton",
    "Implementation",
    "ScoreRules",
    "attention",
    "explain",
    "implementation",
    "reference_attention",
]

# These need torch, so they are imported on first use.
_MODULES = {
    "Explanation": "api",
    "attention": "api",
    "explain": "api",
    "FlashAttentionTorch": "tiled",
    "FlashAttentionTriton": "ops",
    "reference_attention": "reference",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
