"""Linear layers under autocast: the gradient of the weight is written in the weight's dtype without
a cast. In a captured step the weight is not cast either: the update of an optimizer that
`accelerate` was given writes the cast.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from stepscope.acceleration.replacement import (
    Found,
    Left,
    Replacement,
    bias_of,
    is_linear,
    is_transposed,
)
from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.weight_copies import WeightCopies

PIECE = "linear"


def find(model: nn.Module, copies: WeightCopies, claimed: set[nn.Module]) -> Found:
    """Find the linear layers that no other piece has claimed."""
    replacements, left = [], []
    for name, module in model.named_modules():
        if module in claimed:
            continue
        if reason := _refused(module):
            left.append(Left(PIECE, name, reason))
        elif is_linear(module) or is_transposed(module):
            fused = _Linear(module, copies)
            replacements.append(Replacement(PIECE, name, module, fused.forward, fused.declines))
    return replacements, left


def _refused(module: Any) -> str:
    """Return why a linear layer stays: its weight is quantized or sharded, or it is of another
    class."""
    kind = type(module)
    weight = getattr(module, "weight", None)
    if is_linear(module) or is_transposed(module):
        plain = type(weight) is nn.Parameter and weight.is_floating_point()
        return "" if plain else f"its weight is a {type(weight).__name__}"
    if _is_quantized(module):
        return "its weight is quantized"
    is_leaf = not any(True for _ in module.children())
    if "Linear" in kind.__name__ and is_leaf and kind is not nn.Identity:
        return f"it is a {kind.__name__}, not an nn.Linear"
    return ""


def _is_quantized(module: nn.Module) -> bool:
    """Return whether this is a linear layer whose weight is stored in a byte or less per entry."""
    if not hasattr(module, "in_features") or not hasattr(module, "out_features"):
        return False
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(tensor.dim() > 1 and tensor.element_size() == 1 for tensor in tensors)


class _Linear:
    """The fused forward of one linear layer."""

    def __init__(self, module: Any, copies: WeightCopies) -> None:
        self._weight, self._copies = module.weight, copies
        self._transposed = is_transposed(module)

    def declines(self, module: Any, *args: Any, **kwargs: Any) -> str:
        """Return why the original runs. Other parameters are those of a parametrization or of a
        sharded model."""
        if module.weight is not self._weight:
            if self._copies.fp8 is not None:
                why = "its weight was replaced, as FSDP does with gathered ones"
                self._copies.fp8.left(self._weight, why)
            return "its weight was exchanged"
        if len(args) != 1 or kwargs:
            return "it is called with other arguments than a tensor"
        casts = self._weight.dtype != matmul_dtype(args[0])
        return "" if casts or self._copies.fp8 is not None else "its weight needs no cast"

    def forward(self, module: Any, x: Tensor) -> Tensor:
        bias = bias_of(module)
        biases = () if bias is None else (bias,)
        return fused_linear(x, (self._weight,), self._copies, biases, transposed=self._transposed)
