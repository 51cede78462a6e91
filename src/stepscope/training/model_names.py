"""Checks of a user's model, given by the name of the function that builds it."""

from __future__ import annotations

import re

from stepscope.errors import UsageError
from stepscope.model.config import precision


def check_name(name: str) -> str:
    """The name as part of a case's key; an error if it is malformed."""
    if not re.fullmatch(r"[\w.]+:[\w.]+", name, re.ASCII):
        raise UsageError(
            f"the model {name!r} is not of the form package.module:function", "give it with --model"
        )
    return name.replace(":", ".")


def check_dtype(name: str, dtype: str, compiled: str = "no") -> None:
    """Reject dtypes that only the built-in models support, and FP8 for a compiled model."""
    policy = precision(dtype)
    if policy.fp8 and compiled != "no":
        raise UsageError(
            f"{name} in {dtype} is not compiled: torch.compile traces the original layers, which"
            " stepscope.accelerate replaces",
            "leave out one of the two",
        )
    if policy.master or policy.narrow_stream:
        raise UsageError(
            f"{name} does not run in {dtype}",
            "a user's model has no master weights and defines its own residual stream:"
            " use bfloat16 or bfloat16-pure, or fp8 or fp8-pure",
        )
