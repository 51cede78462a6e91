"""Reference attention under torch.compile, and the compilation settings of this package."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from stepscope.attention.call import AttentionCall, Backend
from stepscope.attention.reference import reference_attention

Compiled = TypeVar("Compiled", bound=Callable[..., Tensor])

# One compiled kernel per shape; torch's default recompile limit is 8.
_RECOMPILE_LIMIT = 256


class _Compiled(Backend):
    """`reference_attention` as one graph, recompiled for each new shape."""

    def attend(self, call: AttentionCall) -> Tensor:
        *inputs, is_causal, scale, causal_align, rules = call
        settings = {"is_causal": is_causal, "scale": scale, "causal_align": causal_align}
        return _compiled_reference()(*inputs, **settings, rules=rules)

    def refuses(self, call: AttentionCall) -> str | None:
        if call.rules is not None:
            return "only masks without rules are compiled (FlexAttention compiles rules)"
        return missing_compiler(call.q.device.type)


COMPILED = _Compiled()


@functools.cache
def missing_compiler(device_type: str) -> str | None:
    """Return what torch.compile lacks for that device type, or None."""
    if not any(shutil.which(name) for name in ("g++", "clang++")):
        return "torch.compile needs a C++ compiler"
    if device_type != "cpu" and importlib.util.find_spec("triton") is None:
        return f"torch.compile for {device_type} needs Triton"
    return None


def compile_by_shape(function: Compiled) -> Compiled:
    """Compile a function, specialized on each shape: a graph with dynamic lengths is slower.

    Never falls back to eager: a function that cannot be compiled raises.
    """
    compiled = torch.compile(function, fullgraph=True, dynamic=False)

    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> Tensor:
        try:
            return compiled(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
                return compiled(*args, **kwargs)

    return run  # type: ignore[return-value]


@functools.cache
def _compiled_reference() -> Callable[..., Tensor]:
    return compile_by_shape(reference_attention)
