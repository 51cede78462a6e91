"""How a program that was watched had set up its step: what advice must know."""

from __future__ import annotations

from stepscope.records.decoding import from_json
from stepscope.records.schema import Part, Record


class OptimizerSetting(Part, frozen=True):
    name: str
    of_torch: bool
    """One of torch.optim's own."""
    tensors: int
    fused: bool
    foreach: bool | None
    knows_fused: bool
    """It has that option."""


class Setting(Part, frozen=True):
    models: tuple[str, ...]
    optimizers: tuple[OptimizerSetting, ...]
    compiled: bool
    parameter_formats: dict[str, int]
    """Parameters by number format."""
    matmul_precision: str
    """`highest`, or what lets float32 products run in a shorter format."""
    distributed: bool
    blocks: int = 0
    """Entries of the models' ModuleLists."""
    batch: int | None = None
    """Of its DataLoaders, where all have the same."""


def setting_of(record: Record) -> Setting | None:
    note = record.notes.get("setting")
    return None if note is None else from_json(note, Setting)
