"""RMSNorm and LayerNorm in one kernel each way.

A norm is recognized by what it computes: a module with a weight, and perhaps a bias, and no
children is compared with `rms_norm` and `layer_norm` in float32, on inputs so small that its
epsilon decides the result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.acceleration.replacement import Found, Left, Replacement, has_hooks
from stepscope.attention.inputs import autocast_dtype
from stepscope.kernels.norm import (
    MAX_COLUMNS,
    layer_norm,
    plain_layer_norm,
    plain_rms_norm,
    rms_norm,
)

PIECE, LAYER_NORM = "RMSNorm", "LayerNorm"
_SCALES = (1.0, 1e-3)
"""Scale of the inputs that are compared; with the second, the epsilon is as large as the mean."""
_TOLERANCE = 1e-4
_EPSILONS = ("eps", "variance_epsilon", "epsilon")
_USUAL = (1e-5, 1e-6, 1e-12)
"""Epsilons of LayerNorms that have no attribute for it."""
_OTHER_NORMS = ("batch", "group", "instance")
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
        match, epsilon = matched_norm(module), None
        if match is None:
            epsilon = matched_layer_norm(module)
        if match is not None:
            replacements.append(Replacement(PIECE, name, module, _forward(*match)))
        elif epsilon is not None:
            forward = _layer_norm_forward(module, epsilon)
            replacements.append(Replacement(LAYER_NORM, name, module, forward))
        else:
            piece = LAYER_NORM if _has_bias(module) else PIECE
            left.append(Left(piece, name, "it computes something else"))
    return replacements, left


def _may_be_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    return (
        parameters.keys() <= {"weight", "bias"}
        and weight is not None
        and weight.dim() == 1
        and weight.shape[0] <= MAX_COLUMNS
        and not any(True for _ in module.children())
        and "norm" in type(module).__name__.lower()
        and not any(
            kind in type(module).__name__.lower() for kind in ("batch", "group", "instance")
        )
    )


def _has_bias(module: nn.Module) -> bool:
    return isinstance(getattr(module, "bias", None), Tensor)


def matched_norm(module: nn.Module) -> tuple[float, float] | None:
    """Return the epsilon and offset with which `rms_norm` computes the same; None if none does."""
    if not _may_be_norm(module) or _has_bias(module):
        return None
    epsilons = _epsilons_of(module)
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        epsilons = [torch.finfo(torch.float32).eps]
    for epsilon in epsilons:
        for offset in _OFFSETS:

            def formula(
                x: Tensor, norm: Any, epsilon: float = epsilon, one: float = offset
            ) -> Tensor:
                return plain_rms_norm(x, norm.weight + one, epsilon)

            if _computes(module, formula):
                return epsilon, offset
    return None


def matched_layer_norm(module: nn.Module) -> float | None:
    """Return the epsilon with which `layer_norm` computes the same; None if none does."""
    if not _may_be_norm(module):
        return None
    for epsilon in dict.fromkeys((*_epsilons_of(module), *_USUAL)):

        def formula(x: Tensor, norm: Any, epsilon: float = epsilon) -> Tensor:
            return plain_layer_norm(x, norm.weight, norm.bias, epsilon)

        if _computes(module, formula):
            return epsilon
    return None


def _epsilons_of(module: nn.Module) -> list[float]:
    return [float(v) for n in _EPSILONS if isinstance(v := getattr(module, n, None), float)]


@torch.no_grad()
def _computes(module: nn.Module, formula: Callable[[Tensor, Any], Tensor]) -> bool:
    probe: Any = copy.deepcopy(module).float().cpu()
    generator = torch.Generator().manual_seed(0)
    for parameter in probe.parameters():
        # Distinct values: a fresh norm has ones, which would hide an offset or a missing weight.
        parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    for scale in _SCALES:
        x = torch.randn(2, 3, probe.weight.shape[0], generator=generator) * scale + 0.1 * scale
        try:
            actual, expected = probe(x), formula(x, probe)
        except Exception:
            # It is not a function of one tensor.
            return False
        if not isinstance(actual, Tensor) or actual.shape != expected.shape:
            return False
        # Without the bias, next to which the rest may be small.
        bias = probe.bias if _has_bias(probe) else torch.zeros(())
        if (actual - expected).norm() > _TOLERANCE * (expected - bias).norm():
            return False
    return True


def _forward(epsilon: float, offset: float) -> Any:
    def forward(module: Any, x: Tensor) -> Tensor:
        weight = module.weight + offset if offset else module.weight
        dtype = torch.promote_types(x.dtype, weight.dtype)
        return rms_norm(x, weight, epsilon, dtype)

    return forward


class OutputDtypes:
    """Output dtypes of a norm: what autocast makes of it is up to torch, and depends on the
    device."""

    def __init__(self, norm: nn.Module) -> None:
        self._forward = norm.forward
        self._dtypes: dict[Any, torch.dtype] = {}

    def of(self, dtype: torch.dtype, device: torch.device, weight: Tensor) -> torch.dtype:
        """Return the dtype of the norm of a tensor in that dtype."""
        key = dtype, weight.dtype, device.type, autocast_dtype(weight)
        if key not in self._dtypes:
            with torch.no_grad():
                probe = torch.zeros(1, weight.shape[0], dtype=dtype, device=device)
                self._dtypes[key] = self._forward(probe).dtype
        return self._dtypes[key]


def _layer_norm_forward(module: nn.Module, epsilon: float) -> Any:
    original, dtypes = module.forward, OutputDtypes(module)

    def forward(module: Any, x: Tensor) -> Tensor:
        weight = module.weight
        if type(weight) is not nn.Parameter:
            # Of a sharded model, or of a parametrization.
            return original(x)  # type: ignore[no-any-return]
        return layer_norm(x, weight, module.bias, epsilon, dtypes.of(x.dtype, x.device, weight))

    return forward
