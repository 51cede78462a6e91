"""The Transformer language model, its sizes and its cost model. Imports without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.model.config import PRECISIONS, ModelConfig, Precision, precision
from stepscope.model.sizes import SIZES, find_size, with_overrides

if TYPE_CHECKING:
    from stepscope.model.loss import cross_entropy
    from stepscope.model.transformer import Block, TransformerLM

__all__ = [
    "PRECISIONS",
    "SIZES",
    "Block",
    "ModelConfig",
    "Precision",
    "TransformerLM",
    "cross_entropy",
    "find_size",
    "precision",
    "with_overrides",
]


def __getattr__(name: str) -> Any:
    if name in ("Block", "TransformerLM"):
        from stepscope.model import transformer

        return getattr(transformer, name)
    if name == "cross_entropy":
        from stepscope.model.loss import cross_entropy

        return cross_entropy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
