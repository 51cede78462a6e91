"""Flags and cases of the FP8 study, and the structs in its records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from stepscope.errors import UsageError
from stepscope.kernels.fp8.recipe import BLOCKWISE, E4M3, E5M2, ROWWISE, TENSORWISE, Recipe
from stepscope.model.sizes import find_size
from stepscope.records.schema import Part
from stepscope.training.flag_checks import check_at_least, check_known
from stepscope.training.model_names import check_name
from stepscope.training.text import VOCAB
from stepscope.training.workload import Workload, case_of

CURRENT = (TENSORWISE, ROWWISE, BLOCKWISE)
"""Scalings from the current values of a tensor; delayed scaling is measured by its saturation."""
DTYPES = (E4M3, E5M2)
ROLES = ("input", "weight", "gradient")
"""The tensors that a linear layer casts: its input, its weight, the gradient of its output."""
GEMMS = {"forward": "output", "dX": "gradient of the input", "dW": "gradient of the weight"}
PARTS = ("tensors", "training")
_SIZE = ("small",)


class Fp8Flags(msgspec.Struct, frozen=True, kw_only=True):
    """Models to examine, and how long to train them."""

    size: tuple[str, ...] = _SIZE
    """Sizes of the model (`stepscope list sizes`), trained on the sources of Python's standard
    library, byte by byte."""
    table: Literal["2025", "2026"] = "2025"
    """Year of the CS336 assignment that defines the sizes."""
    context: int = 256
    """Sequence length in tokens."""
    batch: int = 8
    """Sequences per step; for your own model, the batch size passed to make_batch."""
    part: tuple[str, ...] = PARTS
    """Parts to run: tensors (casts and GEMMs of each layer), training (paired loss curves)."""
    steps: int = 100
    """Training steps of each part."""
    probes: int = 4
    """Steps at which the tensors are examined: the first, the last, and some in between."""
    seeds: int = 2
    """Pairs of loss curves. With several, FP8's difference is compared with the spread of
    bfloat16's own curves."""
    scaling: tuple[str, ...] = (TENSORWISE,)
    """Scalings of the FP8 training: tensorwise, delayed, rowwise, blockwise. The tensors are
    examined with all of them."""
    gradient_dtype: str = E4M3
    """FP8 dtype of output gradients in the FP8 training: e4m3, or e5m2 (more range, one bit of
    mantissa less)."""
    model: str = ""
    """Your own model instead of a size: package.module:function (see `run own --help`)."""

    def __post_init__(self) -> None:
        check_at_least(1, context=self.context, batch=self.batch, seeds=self.seeds)
        check_at_least(2, steps=self.steps)
        check_at_least(1, probes=self.probes)
        check_known("part", self.part, PARTS)
        for scaling in self.scaling:
            Recipe(scaling, self.gradient_dtype)
        for name in self.size:
            find_size(name, self.table)
        if self.model:
            check_name(self.model)
            if self.size != _SIZE:
                raise UsageError(f"--size does not apply to {self.model}", "leave out one of them")


class TensorsCase(Workload, frozen=True, kw_only=True, tag_field="part", tag="tensors"):
    """The casts and GEMMs of every linear layer at some steps of a bfloat16 training."""

    steps: int
    probes: int

    @property
    def key(self) -> str:
        return f"tensors_{super().key}_s{self.steps}_p{self.probes}"

    def probed_steps(self) -> tuple[int, ...]:
        """The steps to examine, counted from 1."""
        last = self.probes - 1
        spread = (
            [1 + round(index * (self.steps - 1) / last) for index in range(last)] if last else ()
        )
        return tuple(dict.fromkeys((*spread, self.steps)))


class TrainingCase(Workload, frozen=True, kw_only=True, tag_field="part", tag="training"):
    """A pair of trainings from the same weights on the same data, in bfloat16 and in FP8."""

    steps: int
    seed: int
    scaling: str = TENSORWISE
    gradient_dtype: str = E4M3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recipe()

    @property
    def key(self) -> str:
        gradients = "" if self.gradient_dtype == E4M3 else f"_{self.gradient_dtype}"
        return f"training_{super().key}_{self.scaling}{gradients}_s{self.steps}_seed{self.seed}"

    def recipe(self) -> Recipe:
        return Recipe(self.scaling, self.gradient_dtype)


Fp8Case = TensorsCase | TrainingCase


def cases_of(flags: Fp8Flags) -> Iterator[Fp8Case]:
    for workload in _workloads(flags):
        if "tensors" in flags.part:
            yield case_of(workload, TensorsCase, steps=flags.steps, probes=flags.probes)
        if "training" in flags.part:
            for scaling in flags.scaling:
                for seed in range(flags.seeds):
                    yield case_of(
                        workload,
                        TrainingCase,
                        steps=flags.steps,
                        seed=seed,
                        scaling=scaling,
                        gradient_dtype=flags.gradient_dtype,
                    )


def _workloads(flags: Fp8Flags) -> Iterator[Workload]:
    names = (check_name(flags.model),) if flags.model else flags.size
    own: dict[str, Any] = {"own": flags.model} if flags.model else {}
    for name in names:
        yield Workload(
            size=name,
            table=flags.table,
            context=0 if flags.model else flags.context,
            batch=flags.batch,
            dtype="bfloat16",
            attention="sdpa",
            mode="train-step",
            overrides={} if flags.model else {"vocab": VOCAB},
            **own,
        )


class CastLoss(Part, frozen=True, array_like=True):
    """What one cast loses."""

    error: float
    """Norm of the error over the norm of the tensor."""
    underflow: float
    """Share of nonzero values that become zero."""


Casts = dict[str, dict[str, dict[str, CastLoss]]]
"""By role, FP8 dtype and scaling."""


class GemmLoss(Part, frozen=True):
    """Error of one GEMM against float64: norm of the difference over the norm of the result."""

    bf16: float
    fp8: dict[str, dict[str, float]]
    """By dtype of the gradients and scaling; the forward GEMM has e4m3 only."""
    kernel: float | None = None
    """With the FP8 kernels of this device and the default recipe."""


class LayerProbe(Part, frozen=True):
    """One linear layer at one step."""

    layer: str
    step: int
    amax: dict[str, float]
    """Largest absolute value by role."""
    casts: Casts
    saturated: dict[str, float]
    """Largest share of values beyond the range under delayed scaling since the last probe, by
    role."""
    gemms: dict[str, GemmLoss]
    noise: float | None = None
    """Difference of the weight gradients of two halves of the batch over their sum: the noise that
    the choice of the batch itself puts into dW."""


Probes = tuple[LayerProbe, ...]
LeftOut = dict[str, str]
"""Linear layers without FP8 GEMMs, with the reason."""
