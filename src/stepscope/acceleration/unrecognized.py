"""Parts of a model that no formula recognizes, by the names of their classes: attention of another
form, and mixtures of experts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import nn

from stepscope.acceleration.replacement import Left

_ATTENTION = re.compile("attention|attn|mha", re.IGNORECASE)
_EXPERTS = re.compile("moe|experts", re.IGNORECASE)


def unrecognized_attention(model: nn.Module, known: Iterable[str]) -> Iterator[str]:
    """Yield the names of attention modules, by their classes, without the `known` ones, those
    within them and those around them."""
    for name in _innermost(model, _ATTENTION):
        if not any(_is_within(name, one) or _is_within(one, name) for one in known):
            yield name


def mixtures_of_experts(model: nn.Module) -> list[Left]:
    return [Left("MLP", name, "a mixture of experts") for name in _innermost(model, _EXPERTS)]


def _innermost(model: nn.Module, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the names of modules with parameters whose class matches, without those that contain
    another one."""
    names = [
        name
        for name, module in model.named_modules()
        if name and pattern.search(type(module).__name__) and any(True for _ in module.parameters())
    ]
    for name in names:
        if not any(other != name and _is_within(other, name) for other in names):
            yield name


def _is_within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")
