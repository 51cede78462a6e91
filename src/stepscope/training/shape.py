"""The shape of a built-in model on the command line: a named size and overrides of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import msgspec

from stepscope.errors import UsageError
from stepscope.model.config import ModelConfig
from stepscope.model.sizes import find_size, with_overrides

_MAX_OVERRIDES = 2
"""Most overrides that the name of a model lists."""
FIELDS = {
    "d_model": "d_model",
    "d_ff": "d_ff",
    "layers": "n_layers",
    "heads": "n_heads",
    "vocab": "vocab",
}
"""Fields of `ModelConfig` by the flags that override them."""


class ShapeFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Named sizes, and overrides of their fields."""

    size: tuple[str, ...] = ("small",)
    """Sizes of the model (`stepscope list sizes`): small, medium, large, xl, 2.7b (2025); 8b, 10b
    (2026); tiny, mini, midi for a CPU."""
    table: Literal["2025", "2026"] = "2025"
    """Year of the CS336 assignment that defines the sizes; xl differs between the years."""
    d_model: int | None = None
    """Override the width of the model."""
    d_ff: int | None = None
    """Override the width of the feed-forward layers."""
    layers: int | None = None
    """Override the number of blocks."""
    heads: int | None = None
    """Override the number of attention heads."""
    vocab: int | None = None
    """Override the vocabulary size."""

    @property
    def overrides(self) -> dict[str, int]:
        """The fields of the model that were given."""
        given = {field: getattr(self, flag) for flag, field in FIELDS.items()}
        return {field: value for field, value in given.items() if value is not None}


def model_shape(size: str, table: str, context: int, overrides: Mapping[str, int]) -> ModelConfig:
    """Return the configuration; an error of the overrides names the size."""
    return _model_shape(size, table, context, tuple(overrides.items()))


# Cached: the records of a file have few different shapes, and each is asked for several times.
@lru_cache(maxsize=1024)
def _model_shape(
    size: str, table: str, context: int, overrides: tuple[tuple[str, int], ...]
) -> ModelConfig:
    named = with_overrides(find_size(size, table), context=context)
    try:
        return with_overrides(named, **dict(overrides))
    except UsageError as error:
        raise UsageError(f"{size_name(size, dict(overrides))}: {error}") from None


def size_key(size: str, overrides: Mapping[str, int]) -> str:
    """The size within the key of a case."""
    return size + "".join(f"+{name}={value}" for name, value in sorted(overrides.items()))


def size_name(size: str, overrides: Mapping[str, int]) -> str:
    """The size with its overrides, or with their number where they are many."""
    if not overrides:
        return size
    listed = ", ".join(f"{name}={value}" for name, value in overrides.items())
    many = len(overrides) > _MAX_OVERRIDES
    return f"{size} ({f'{len(overrides)} overrides' if many else listed})"
