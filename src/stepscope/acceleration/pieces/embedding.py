"""Token embeddings with a deterministic gradient kernel, also those that are scaled as Gemma's, and
those of a user's own class that index their weight."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from stepscope.acceleration.own_classes import computes_embedding
from stepscope.acceleration.replacement import Found, Left, Replacement
from stepscope.kernels.embedding import embedded

PIECE = "embedding"


def find(model: nn.Module) -> Found:
    replacements, left = [], []
    for name, module in model.named_modules():
        if computes_embedding(module):
            replacements.append(Replacement(PIECE, name, module, _own_forward))
            continue
        forward = _forward if type(module) is nn.Embedding else None
        if _is_scaled(module):
            forward = _scaled_forward
        if forward is None or not isinstance(module, nn.Embedding):
            continue
        if reason := _refused(module):
            left.append(Left(PIECE, name, reason))
        else:
            replacements.append(Replacement(PIECE, name, module, forward))
    return replacements, left


def _refused(module: nn.Embedding) -> str:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return "it renormalizes rows, scales gradients by frequency, or has sparse gradients"
    return ""


def _forward(module: nn.Embedding, tokens: Tensor) -> Tensor:
    return embedded(tokens, module.weight, module.padding_idx)


def _own_forward(module: Any, tokens: Tensor) -> Tensor:
    return embedded(tokens, module.weight)


def _is_scaled(module: nn.Module) -> bool:
    """Return whether this may be an embedding times a constant; the first call compares both."""
    scaled = isinstance(getattr(module, "embed_scale", None), Tensor | float | int)
    return isinstance(module, nn.Embedding) and scaled


def _scaled_forward(module: Any, tokens: Tensor) -> Any:
    scale = module.embed_scale
    if isinstance(scale, Tensor):
        scale = scale.to(module.weight.dtype)
    return _forward(module, tokens) * scale
