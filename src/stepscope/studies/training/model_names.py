"""A user's model, by the name of the function that builds it."""

from __future__ import annotations

import re

from stepscope.errors import UsageError
from stepscope.model.config import precision


def check_name(name: str) -> str:
    """The name as part of a case's key; refused where it is none."""
    if not re.fullmatch(r"[\w.]+:[\w.]+", name, re.ASCII):
        raise UsageError(
            f"the model {name!r} is not of the form package.module:function",
            "give it with --model",
        )
    return name.replace(":", ".")


def check_dtype(name: str, dtype: str) -> None:
    """Refuse dtypes that need a model of ours."""
    form = precision(dtype)
    if form.master or form.narrow_stream:
        raise UsageError(
            f"{name} does not run in {dtype}",
            "a model of your own has no master weights, and the residual stream that its author"
            " gave it: take bfloat16 or bfloat16-pure",
        )
