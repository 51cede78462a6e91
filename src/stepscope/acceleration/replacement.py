"""What a piece finds in a model: the modules it replaces, and those it leaves with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn


class Replacement(NamedTuple):
    """A module whose forward is replaced: `forward(module, *args, **kwargs)`, bound on the
    instance."""

    piece: str
    name: str
    module: nn.Module
    forward: Callable[..., Any]


class Left(NamedTuple):
    """A module that is left alone, and why."""

    piece: str
    name: str
    reason: str
