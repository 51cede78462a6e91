"""Claims on flags: which studies take the dimensions of a model one by one."""

from __future__ import annotations

from pathlib import Path

from claims.records import Claim
from stepscope.studies.registry import viewables

_DIMENSIONS = {"layers", "d_model", "d_ff", "heads", "vocab"}


def _with_dimensions(_: Path) -> str:
    """Studies of the built-in sizes with a flag for each dimension."""
    flags = {
        name: set(getattr(getattr(study, "flags", None), "__struct_fields__", ()))
        for name, study in viewables().items()
    }
    return ", ".join(
        f"`{name}`" for name, taken in flags.items() if taken >= {"size"} | _DIMENSIONS
    )


CLAIMS: dict[str, Claim] = {"sizes.all-dimensions": _with_dimensions}
