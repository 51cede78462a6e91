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
            replacements.append(Replacement(PIECE, name, module, _forward(module, copies)))
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


def _forward(module: Any, copies: WeightCopies) -> Any:
    original, weight = module.forward, module.weight

    def forward(module: Any, x: Tensor) -> Any:
        if module.weight is not weight or not _applies(module, x):
            return original(x)
        biases = () if module.bias is None else (module.bias,)
        tokens = fused_linear(_patches(x, *module.kernel_size), (weight,), copies, biases)
        return tokens.permute(0, 3, 1, 2)

    return forward


def _applies(module: nn.Conv2d, x: Tensor) -> bool:
    """Return whether x are images of whole patches, and the convolution would run in 16 bits: in
    float32 it may use TF32, which matmuls do not use by default."""
    height, width = module.kernel_size
    return (
        x.dim() == 4
        and not x.requires_grad
        and x.shape[1] == module.in_channels
        and x.shape[2] % height == 0
        and x.shape[3] % width == 0
        and matmul_dtype(x).itemsize == 2
        and module.weight.is_contiguous()
    )


def _patches(x: Tensor, height: int, width: int) -> Tensor:  # (batch, channels, rows, columns)
    """Return (batch, rows / height, columns / width, channels · height · width)."""
    batch, channels, rows, columns = x.shape
    parts = x.view(batch, channels, rows // height, height, columns // width, width)
    parts = parts.permute(0, 2, 4, 1, 3, 5)
    patches = torch.empty(parts.shape, device=x.device, dtype=matmul_dtype(x))
    return patches.copy_(parts).flatten(3)
