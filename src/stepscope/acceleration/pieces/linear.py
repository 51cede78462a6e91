"""Linear layers under autocast: the cast of the weight is cached from step to step, and the
gradient of the weight is written in the weight's dtype without a cast.

`FusedAdamW`, and an optimizer that `accelerate` was given, write the cached copy in the update.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from stepscope.acceleration.replacement import Found, Replacement
from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels.matmul import fused_linear, transposed_linear
from stepscope.kernels.weight_copies import WeightCopies

PIECE = "linear"


def find(model: nn.Module, copies: WeightCopies, claimed: set[nn.Module]) -> Found:
    """Find the linear layers that no other piece has claimed."""
    replacements = []
    for name, module in model.named_modules():
        if module in claimed:
            continue
        if type(module) is nn.Linear:
            forward = _forward(module, copies)
        elif _is_transposed(module):
            forward = _transposed_forward(module, copies)
        else:
            continue
        replacements.append(Replacement(PIECE, name, module, forward))
    return replacements, []


def _is_transposed(module: nn.Module) -> bool:
    """Return whether this is the `Conv1D` of transformers, a linear layer with a (d, rows)
    weight."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _forward(module: nn.Linear, copies: WeightCopies) -> Any:
    original, weight = module.forward, module.weight

    def forward(module: nn.Linear, x: Tensor) -> Tensor:
        if not casts(module, weight, x):
            return original(x)
        biases = () if module.bias is None else (module.bias,)
        return fused_linear(x, (weight,), copies, biases)

    return forward


def _transposed_forward(module: Any, copies: WeightCopies) -> Any:
    original, weight = module.forward, module.weight

    def forward(module: Any, x: Tensor) -> Any:
        if not casts(module, weight, x):
            return original(x)
        return transposed_linear(x, weight, copies, module.bias)

    return forward


def casts(module: Any, weight: Tensor, x: Tensor) -> bool:
    """Return whether the module still has this parameter, and a matmul with x would cast it. Other
    parameters are those of a parametrization or of a sharded model."""
    return module.weight is weight and weight.dtype != matmul_dtype(x)
