"""Conditions under which the Triton kernels can run."""

from __future__ import annotations

import torch
from torch import Tensor

from stepscope.torch_tools.derivatives import transforms_active
from stepscope.torch_tools.triton_available import HAS_TRITON, is_interpreted, supports_dtype


def kernels_take(*tensors: Tensor) -> bool:
    """Return whether the kernels support these tensors: on one GPU, or in Triton's interpreter.

    Not under torch.compile, which fuses the naive version itself, nor under `torch.func` transforms
    and forward-mode AD, which differentiate and map the naive version. Tensors on several devices
    are left to the naive version too: torch raises an error that names them, where a kernel would
    read addresses of another device.
    """
    if not HAS_TRITON or torch.compiler.is_compiling() or transforms_active():
        return False
    if not all(supports_dtype(x.dtype) and x.numel() for x in tensors):
        return False
    device = tensors[0].device
    if any(x.device != device for x in tensors):
        return False
    return is_interpreted() or device.type == "cuda"
