"""Setup of the training step of an observed program, used by the advice rules."""

from __future__ import annotations

from stepscope.records.decoding import Int64
from stepscope.records.schema import Part, Record
from stepscope.records.sharing import Sharing


class OptimizerSetting(Part, frozen=True):
    """Setup of one optimizer."""

    name: str
    of_torch: bool
    """True for a class of torch.optim."""
    tensors: Int64
    fused: bool
    foreach: bool | None
    knows_fused: bool
    """True if it supports `fused=True`."""


class Setting(Part, frozen=True):
    """Setup of a training step: models, optimizers, dtypes, batch size."""

    models: tuple[str, ...]
    optimizers: tuple[OptimizerSetting, ...]
    compiled: bool
    parameter_formats: dict[str, Int64]
    """Number of parameters by dtype."""
    matmul_precision: str
    """`highest`, or a setting that lets float32 matmuls use TF32."""
    distributed: bool
    blocks: Int64 = 0
    """Number of entries of the models' ModuleLists."""
    batch: Int64 | None = None
    """Batch size of its DataLoaders, if all have the same."""
    loader_workers: Int64 = 0
    """Worker processes of the DataLoader that the steps took batches from."""
    sharing: Sharing | None = None
    """How ranks share the model; None if they do not, and in older records."""
    compiled_by_accelerate: bool = False
    """`stepscope.accelerate` compiles the model by default."""
    pieces: dict[str, dict[str, Int64]] | None = None
    """In older records: modules that `accelerate` replaced then."""


def setting_of(record: Record) -> Setting | None:
    return record.attachment("setting", Setting)
