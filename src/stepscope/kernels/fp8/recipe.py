"""FP8 recipes: which tensors of a linear layer are cast, to which dtype, and with which scales.
Imports without torch.

A linear layer has three GEMMs: the output x Wᵀ, the gradient of the input dY W, and the gradient of
the weight dYᵀ x. Tensor cores read e4m3 (4 bits of exponent, 3 of mantissa, at most 448) and e5m2
(at most 57,344); a scale maps the values of a tensor into that range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.errors import UsageError

if TYPE_CHECKING:
    import torch

TENSORWISE, DELAYED, ROWWISE, BLOCKWISE = "tensorwise", "delayed", "rowwise", "blockwise"
SCALINGS = (TENSORWISE, DELAYED, ROWWISE, BLOCKWISE)
"""`tensorwise`: one scale per tensor, from its current largest absolute value (amax). `delayed`:
one scale per tensor, from the amax of earlier steps, so that one pass over the values is enough.
`rowwise`: one scale per row of the GEMM operand, so a tensor has other scales for each GEMM that
contracts over another dimension. `blockwise`: one scale per 128 values of a row of the operand."""
E4M3, E5M2 = "e4m3", "e5m2"
LARGEST = {E4M3: 448.0, E5M2: 57_344.0}
"""Largest finite value of each dtype."""
FP8, BF16 = "fp8", "bf16"
FORWARD, ALL_GEMMS, NO_GEMM = "forward", "all", "none"
BLOCK = 128
"""Values per scale of `blockwise`."""
MULTIPLE = 16
"""FP8 GEMMs need dimensions that are multiples of this."""


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name}={value!r} does not exist", f"one of {', '.join(known)}")


@dataclass(frozen=True)
class Recipe:
    """How the GEMMs of a linear layer run in FP8. Inputs and weights are e4m3."""

    scaling: str = TENSORWISE
    gradient_dtype: str = E4M3
    """The dtype of gradients of the output: e5m2 has more range, e4m3 one more bit of mantissa."""
    weight_gradient: str = FP8
    """The dtype of the GEMM of the weight's gradient. With `bf16` the input is saved in bf16."""
    fast_accumulation: str = ALL_GEMMS
    """The GEMMs (`forward`, `all`, `none`) whose tensor cores add partial sums without promoting
    them to float32 registers: faster, with about 14 bits of accumulation, where the casts of the
    operands leave 4: the gradients of a model had the same error either way."""
    history: int = 16
    """Steps whose amax a `delayed` scale considers."""

    def __post_init__(self) -> None:
        _check("scaling", self.scaling, SCALINGS)
        _check("gradient_dtype", self.gradient_dtype, (E4M3, E5M2))
        _check("weight_gradient", self.weight_gradient, (FP8, BF16))
        _check("fast_accumulation", self.fast_accumulation, (FORWARD, ALL_GEMMS, NO_GEMM))
        if self.history < 1:
            raise UsageError(f"a history of {self.history} steps", "give at least 1")
        if self.scaling == BLOCKWISE and self.gradient_dtype != E4M3:
            raise UsageError(
                "blockwise scaling with e5m2 gradients", "blockwise GEMMs take e4m3 only"
            )

    @property
    def one_scale(self) -> bool:
        """Whether a tensor has one scale, which serves every GEMM that reads it."""
        return self.scaling in (TENSORWISE, DELAYED)

    def fast(self, forward: bool) -> bool:
        """Return whether a GEMM of the forward or of the backward pass accumulates fast. Blockwise
        GEMMs promote the sum of every block."""
        if self.scaling == BLOCKWISE:
            return False
        return self.fast_accumulation == ALL_GEMMS or (
            forward and self.fast_accumulation == FORWARD
        )

    def __str__(self) -> str:
        parts = [self.scaling]
        if self.gradient_dtype != E4M3:
            parts.append(f"{self.gradient_dtype} gradients")
        if self.weight_gradient != FP8:
            parts.append("weight gradients in bf16")
        if self.fast_accumulation != ALL_GEMMS:
            parts.append(f"fast accumulation: {self.fast_accumulation}")
        return ", ".join(parts)


DEFAULT = Recipe()


def recipe_of(recipe: Recipe | str | None) -> Recipe:
    """Return a recipe given as such, by the name of its scaling, or None for the default."""
    if recipe is None:
        return DEFAULT
    return Recipe(recipe) if isinstance(recipe, str) else recipe


def unavailable(device: torch.device | str, recipe: Recipe = DEFAULT) -> str | None:
    """Return why FP8 GEMMs of this recipe cannot run on a device; None if they can. Nothing is
    emulated: on such a device the layers stay in their own dtype."""
    import torch

    device = torch.device(device)
    if device.type != "cuda":
        return f"FP8 GEMMs need an NVIDIA GPU; the device is {device.type}"
    if torch.version.hip is not None:
        return "FP8 GEMMs are implemented for NVIDIA GPUs; this is a ROCm build of torch"
    if not hasattr(torch, "_scaled_mm"):
        return f"torch {torch.__version__} has no scaled matmul"
    capability = torch.cuda.get_device_capability(device)
    name = f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
    if capability < (8, 9):
        return f"FP8 tensor cores need compute capability 8.9; {name}"
    if not recipe.one_scale and capability < (9, 0):
        return f"{recipe.scaling} scales need compute capability 9.0; {name}"
    if recipe.scaling == BLOCKWISE:
        if capability[0] != 9:
            return f"blockwise GEMMs exist for compute capability 9; {name}"
        cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
        if cuda < (12, 9):
            return f"blockwise GEMMs need CUDA 12.9; this torch has {torch.version.cuda}"
    return None


def shape_refused(tokens: int | None, d_in: int, d_out: int) -> str | None:
    """Return why a linear layer of this shape has no FP8 GEMMs; None if it has. `tokens` may be
    None where it is not known yet."""
    sizes = {"tokens": tokens, "in_features": d_in, "out_features": d_out}
    for name, size in sizes.items():
        if size is not None and (size % MULTIPLE or not size):
            return f"{name}={size} is not a positive multiple of {MULTIPLE}"
    return None
