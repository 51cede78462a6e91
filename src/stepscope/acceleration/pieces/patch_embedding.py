"""Patch embeddings of images as a matmul: a convolution whose kernels do not overlap.

The patches are copied once, in the dtype of the matmul, and the result has the layout of tokens: a
convolution library would transpose the images and the result, in the backward pass too. The weight
is cached and its gradient written as in a linear layer. Convolutions of other tensors than images,
which need a gradient, stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stepscope.acceleration.replacement import Found, Left, Replacement, has_hooks
from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.weight_copies import WeightCopies

PIECE = "patch embedding"
_MAX_CHANNELS = 4
"""Channels of images; convolutions of more channels are within a model."""


def find(model: nn.Module, copies: WeightCopies) -> Found:
    replacements, left = [], []
    for name, module in model.named_modules():
        if not _is_patch_embedding(module):
            continue
        if has_hooks(module):
            left.append(Left(PIECE, name, "it has hooks"))
        else:
            fused = _PatchEmbedding(module, copies)
            replacements.append(Replacement(PIECE, name, module, fused.forward, fused.declines))
    return replacements, left


def _is_patch_embedding(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and module.kernel_size == module.stride
        and module.kernel_size != (1, 1)
        and module.padding == (0, 0)
        and module.dilation == (1, 1)
        and module.groups == 1
        and module.in_channels <= _MAX_CHANNELS
        and type(module.weight) is nn.Parameter
    )


class _PatchEmbedding:
    """The forward of one convolution as a matmul."""

    def __init__(self, module: nn.Conv2d, copies: WeightCopies) -> None:
        self._weight, self._copies = module.weight, copies

    def declines(self, module: nn.Conv2d, *args: Any, **kwargs: Any) -> str:
        """Return why the original runs: these are not images of whole patches, or it would run in
        float32, in which it may use TF32, as matmuls do not by default."""
        if len(args) != 1 or kwargs:
            return "it is called with other arguments than a tensor"
        (x,) = args
        height, width = module.kernel_size
        if module.weight is not self._weight:
            return "its weight was exchanged"
        if not module.weight.is_contiguous():
            return "its weight is not contiguous, as in channels_last"
        if x.dim() != 4 or x.requires_grad or x.shape[1] != module.in_channels:
            return "its input is not a batch of images"
        if x.shape[2] % height or x.shape[3] % width:
            return "the images are not whole patches"
        return "" if matmul_dtype(x).itemsize == 2 else "it runs in float32"

    def forward(self, module: nn.Conv2d, x: Tensor) -> Tensor:
        biases = () if module.bias is None else (module.bias,)
        patches = _patches(x, *module.kernel_size)
        return fused_linear(patches, (self._weight,), self._copies, biases).permute(0, 3, 1, 2)


def _patches(x: Tensor, height: int, width: int) -> Tensor:  # (batch, channels, rows, columns)
    """Return (batch, rows / height, columns / width, channels · height · width)."""
    batch, channels, rows, columns = x.shape
    parts = x.view(batch, channels, rows // height, height, columns // width, width)
    parts = parts.permute(0, 2, 4, 1, 3, 5)
    patches = torch.empty(parts.shape, device=x.device, dtype=matmul_dtype(x))
    return patches.copy_(parts).flatten(3)
