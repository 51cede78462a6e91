"""Gated MLP, down(silu(gate x) · up x), with gate and up as one matmul.

A module with three linear layers of matching shapes is compared with that formula in float32, with
either of the first two as the gate.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.acceleration.replacement import (
    Found,
    Left,
    Replacement,
    has_hooks,
    is_plain_linear,
)
from stepscope.kernels.activation_policy import NORMS
from stepscope.kernels.feed_forward import feed_forward
from stepscope.kernels.weight_copies import WeightCopies

PIECE = "gated MLP"
_TOLERANCE = 1e-4


class Names(NamedTuple):
    """Attributes of the three layers."""

    gate: str
    up: str
    down: str


def find(model: nn.Module, copies: WeightCopies) -> Found:
    replacements, left = [], []
    for name, module in model.named_modules():
        candidates = _candidates(module)
        if not candidates:
            continue
        reason = _refused(module)
        match = None if reason else next((c for c in candidates if _computes(module, c)), None)
        if match is None:
            left.append(Left(PIECE, name, reason or "it computes something else"))
        else:
            replacements.append(Replacement(PIECE, name, module, _forward(match, module, copies)))
    return replacements, left


def _candidates(module: nn.Module) -> list[Names]:
    """Return the possible roles of three linear layers whose shapes fit a gated MLP."""
    layers = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    if len(layers) != 3 or len({id(child) for child in layers.values()}) != 3:
        return []
    for down, last in layers.items():
        first = [name for name in layers if name != down]
        shapes = [layers[name].weight.shape for name in first]
        if shapes[0] == shapes[1] == last.weight.shape[::-1] and shapes[0][0] != shapes[0][1]:
            return [Names(first[0], first[1], down), Names(first[1], first[0], down)]
    return []


def _refused(module: nn.Module) -> str:
    layers = [child for child in module.children() if isinstance(child, nn.Linear)]
    if any(layer.bias is not None for layer in layers):
        return "its layers have biases"
    if has_hooks(module) or not all(map(is_plain_linear, layers)):
        return "it has hooks"
    return ""


@torch.no_grad()
def _computes(module: nn.Module, names: Names) -> bool:
    """Return whether the module computes the formula in float32 with its layers in these roles."""
    small = copy.deepcopy(module, {id(p): p for p in module.parameters()})
    generator = torch.Generator().manual_seed(0)
    for child in small.children():
        if isinstance(child, nn.Linear):
            # Smaller layers: the formula does not depend on the sizes.
            sizes = (16, 8) if child.weight.shape[0] > child.weight.shape[1] else (8, 16)
            child.weight = nn.Parameter(torch.randn(*sizes, generator=generator))
    small = small.cpu().eval()
    gate, up, down = (getattr(small, name).weight for name in names)
    x = torch.randn(2, 3, gate.shape[1], generator=generator)
    try:
        actual = small(x)
    except Exception:
        # It is not a function of one tensor.
        return False
    expected = functional.linear(
        functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down
    )
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        return False
    return bool((actual - expected).norm() <= _TOLERANCE * expected.norm())


def _forward(names: Names, module: nn.Module, copies: WeightCopies) -> Any:
    original = module.forward
    weights = tuple(getattr(module, name).weight for name in names)

    def forward(module: Any, x: Tensor) -> Any:
        layers = tuple(getattr(module, name) for name in names)
        current = tuple(layer.weight for layer in layers)
        # Other layers (an adapter), other parameters (sharded) or later hooks: the original.
        if not all(map(is_plain_linear, layers)) or any(
            now is not then for now, then in zip(current, weights, strict=True)
        ):
            return original(x)
        gate, up, down = current
        if not gate.dtype == up.dtype == down.dtype:
            return original(x)
        return feed_forward(x, gate, up, down, copies, NORMS)

    return forward
