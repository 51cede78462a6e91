"""How a program that was watched had set up its step: what advice must know."""

from __future__ import annotations

from stepscope.records.decoding import Int64
from stepscope.records.schema import Part, Record


class OptimizerSetting(Part, frozen=True):
    name: str
    of_torch: bool
    """One of torch.optim's own."""
    tensors: Int64
    fused: bool
    foreach: bool | None
    knows_fused: bool
    """It has that option."""


class Setting(Part, frozen=True):
    models: tuple[str, ...]
    optimizers: tuple[OptimizerSetting, ...]
    compiled: bool
    parameter_formats: dict[str, Int64]
    """Parameters by number format."""
    matmul_precision: str
    """`highest`, or what lets float32 products run in a shorter format."""
    distributed: bool
    blocks: Int64 = 0
    """Entries of the models' ModuleLists."""
    batch: Int64 | None = None
    """Of its DataLoaders, where all have the same."""


def setting_of(record: Record) -> Setting | None:
    return record.attachment("setting", Setting)
