"""The reference form under torch.compile, and how anything here is compiled."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from stepscope.attention.reference import reference_attention

Compiled = TypeVar("Compiled", bound=Callable[..., Tensor])

# One kernel for each shape; torch would stop at 8 of them.
_MOST_SHAPES = 256


def compiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_align: str | None = None,
) -> Tensor:
    """`reference_attention` as one graph, compiled anew for each shape that it meets."""
    run = _compiled_reference()
    return run(q, k, v, is_causal=is_causal, scale=scale, causal_align=causal_align)


def refuses(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, causal_align: str | None
) -> str | None:
    del k, v, is_causal, scale, causal_align
    return missing_compiler(q.device.type)


@functools.cache
def missing_compiler(device_type: str) -> str | None:
    """What torch.compile lacks for that kind of device."""
    if not any(shutil.which(name) for name in ("g++", "clang++")):
        return "torch.compile needs a C++ compiler"
    if device_type != "cpu" and importlib.util.find_spec("triton") is None:
        return f"torch.compile for {device_type} needs Triton"
    return None


def compile_by_shape(function: Compiled) -> Compiled:
    """Specialised on each shape: a graph for all lengths is slower, and a study compares shapes.

    Never falls back to eager: what cannot be compiled is an error.
    """
    compiled = torch.compile(function, fullgraph=True, dynamic=False)

    @functools.wraps(function)
    def run(*args: object, **how: object) -> Tensor:
        try:
            return compiled(*args, **how)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            with torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES):
                return compiled(*args, **how)

    return run  # type: ignore[return-value]


@functools.cache
def _compiled_reference() -> Callable[..., Tensor]:
    return compile_by_shape(reference_attention)
