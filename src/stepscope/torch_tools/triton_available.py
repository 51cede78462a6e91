"""Availability of Triton, the dtypes and device of its kernels, and the TF32 setting."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
Launcher = TypeVar("Launcher", bound=Callable[..., Any])
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def supports_dtype(dtype: torch.dtype) -> bool:
    """Return whether the kernels support a dtype. The interpreter computes bfloat16 incorrectly."""
    return dtype in _DTYPES and not (dtype == torch.bfloat16 and is_interpreted())


def nvidia_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU, and (0, 0) for any other device: the numbers
    of AMD's GPUs, such as 9.4, count something else."""
    if device.type != "cuda" or torch.version.hip is not None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def tf32_is_enabled() -> bool:
    """Return whether a float32 matmul on CUDA may use TF32.

    `torch.get_float32_matmul_precision` reads only the older of torch's two settings: in a program
    that sets `fp32_precision` it raises, or returns a value that cuBLAS does not follow.
    """
    return torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"


def on_its_device(launch: Launcher) -> Launcher:
    """Make the device of the first argument, a tensor or a list of tensors, the current device
    while `launch` runs.

    Triton launches on the current device and its stream, whatever device the pointers belong to.
    With a tensor of another GPU that is an illegal access, or a race if the two have peer access.
    """

    @functools.wraps(launch)
    def launched(first: Any, *rest: Any, **options: Any) -> Any:
        x = first[0] if isinstance(first, list) else first
        if not x.is_cuda or x.device.index == torch.cuda.current_device():
            return launch(first, *rest, **options)
        with torch.cuda.device(x.device):
            return launch(first, *rest, **options)

    return launched  # type: ignore[return-value]
