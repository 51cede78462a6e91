"""RMSNorm in one kernel, in the dtype of the matmul that reads it where only matmuls do.

A norm is recognized by what it computes: a module with one weight and no children is compared with
`rms_norm` in float32, on inputs so small that its epsilon decides the result.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.acceleration.replacement import Found, Left, Replacement, has_hooks
from stepscope.kernels.norm import MAX_COLUMNS, plain_rms_norm, rms_norm

PIECE = "RMSNorm"
_SCALES = (1.0, 1e-3)
"""Scale of the inputs that are compared; with the second, the epsilon is as large as the mean."""
_TOLERANCE = 1e-4
_EPSILONS = ("eps", "variance_epsilon", "epsilon")
_OFFSETS = (0.0, 1.0)
"""Constant that is added to the weight; Gemma adds 1."""


def find(model: nn.Module) -> Found:
    replacements, left = [], []
    for name, module in model.named_modules():
        if not _may_be_norm(module):
            continue
        if has_hooks(module):
            left.append(Left(PIECE, name, "it has hooks"))
            continue
        match = matched_norm(module)
        if match is None:
            left.append(Left(PIECE, name, "it computes something else"))
        else:
            replacements.append(Replacement(PIECE, name, module, _forward(*match)))
    return replacements, left


def _may_be_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    return (
        len(parameters) == 1
        and weight is not None
        and weight.dim() == 1
        and weight.shape[0] <= MAX_COLUMNS
        and not any(True for _ in module.children())
        and "norm" in type(module).__name__.lower()
        and "batch" not in type(module).__name__.lower()
    )


def matched_norm(module: nn.Module) -> tuple[float, float] | None:
    """Return the epsilon and offset with which `rms_norm` computes the same; None if none does."""
    if not _may_be_norm(module):
        return None
    epsilons = [float(v) for n in _EPSILONS if isinstance(v := getattr(module, n, None), float)]
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        epsilons = [torch.finfo(torch.float32).eps]
    for epsilon in epsilons:
        for offset in _OFFSETS:
            if _computes(module, epsilon, offset):
                return epsilon, offset
    return None


@torch.no_grad()
def _computes(module: nn.Module, epsilon: float, offset: float) -> bool:
    probe = copy.deepcopy(module).float().cpu()
    weight = probe.weight
    assert isinstance(weight, Tensor)
    generator = torch.Generator().manual_seed(0)
    # Distinct weights: a fresh norm has ones, which would hide an offset or a missing weight.
    weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
    for scale in _SCALES:
        x = torch.randn(2, 3, weight.shape[0], generator=generator) * scale + 0.1 * scale
        try:
            actual = probe(x)
        except Exception:
            # It is not a function of one tensor.
            return False
        expected = plain_rms_norm(x, weight + offset, epsilon)
        if not isinstance(actual, Tensor) or actual.shape != expected.shape:
            return False
        if (actual - expected).norm() > _TOLERANCE * expected.norm():
            return False
    return True


def _forward(epsilon: float, offset: float) -> Any:
    def forward(module: Any, x: Tensor) -> Tensor:
        weight = module.weight + offset if offset else module.weight
        dtype = torch.promote_types(x.dtype, weight.dtype)
        return rms_norm(x, weight, epsilon, dtype)

    return forward
