"""Models of one's own by the name of the function that builds them."""

from __future__ import annotations

import re

from stepscope.errors import UsageError


def check_name(name: str) -> str:
    """The name as part of a case's key; refused where it is none."""
    if not re.fullmatch(r"[\w.]+:[\w.]+", name, re.ASCII):
        raise UsageError(
            f"the model {name!r} is not of the form package.module:function",
            "give it with --model",
        )
    return name.replace(":", ".")
