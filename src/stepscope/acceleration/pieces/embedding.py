"""Token embeddings with a deterministic gradient kernel."""

from __future__ import annotations

from torch import Tensor, nn

from stepscope.acceleration.replacement import Found, Left, Replacement
from stepscope.kernels.embedding import embedded

PIECE = "embedding"


def find(model: nn.Module) -> Found:
    replacements, left = [], []
    for name, module in model.named_modules():
        if type(module) is not nn.Embedding:
            continue
        if reason := _refused(module):
            left.append(Left(PIECE, name, reason))
        else:
            replacements.append(Replacement(PIECE, name, module, _forward))
    return replacements, left


def _refused(module: nn.Embedding) -> str:
    if module.padding_idx is not None:
        return "its padding row has no gradient"
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return "it renormalizes rows, scales gradients by frequency, or has sparse gradients"
    return ""


def _forward(module: nn.Embedding, tokens: Tensor) -> Tensor:
    return embedded(tokens, module.weight)
