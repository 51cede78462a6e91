"""Model sizes by name: two tables of the course and small ones for a CPU. Imports without torch."""

from __future__ import annotations

from typing import Any

import msgspec

from stepscope.errors import UsageError, unknown_name
from stepscope.model.config import ModelConfig


def _size(d_model: int, d_ff: int, n_layers: int, n_heads: int) -> ModelConfig:
    return ModelConfig(d_model=d_model, d_ff=d_ff, n_layers=n_layers, n_heads=n_heads)


_SHARED = {
    "small": _size(768, 3072, 12, 12),
    "medium": _size(1024, 4096, 24, 16),
    "large": _size(1280, 5120, 36, 20),
}

SIZES: dict[str, dict[str, ModelConfig]] = {
    "2025": {
        **_SHARED,
        "xl": _size(1600, 6400, 48, 25),
        "2.7b": _size(2560, 10240, 32, 32),
    },
    "2026": {
        **_SHARED,
        "xl": _size(2560, 10240, 32, 32),
        "10b": _size(4608, 12288, 50, 36),
        # The model of the 2026 course's leaderboard, 8.13 billion parameters.
        "8b": ModelConfig(d_model=4096, d_ff=11_008, n_layers=34, n_heads=32, vocab=151_936),
    },
    # Each about three times the work of the one before.
    "tiny": {
        "tiny": _size(128, 512, 2, 4),
        "mini": _size(256, 1024, 4, 4),
        "midi": _size(384, 1536, 6, 6),
    },
}


def find_size(name: str, table: str = "2025") -> ModelConfig:
    """Return the size of that name in that table; the tiny sizes are in every table."""
    if table not in SIZES:
        raise unknown_name("size table", table, SIZES)
    known = SIZES["tiny"] | SIZES[table]
    if name not in known:
        elsewhere = [other for other, sizes in SIZES.items() if name in sizes]
        if elsewhere:
            raise UsageError(
                f"size {name!r} is not in the table of {table}", f"give --table {elsewhere[0]}"
            )
        raise unknown_name("size", name, known)
    return known[name]


def with_overrides(config: ModelConfig, **fields: Any) -> ModelConfig:
    """Return a copy of the configuration with some fields changed, validated like any other."""
    for name in fields:
        if name not in config.__struct_fields__:
            raise unknown_name("model field", name, config.__struct_fields__)
    return msgspec.structs.replace(config, **fields)
