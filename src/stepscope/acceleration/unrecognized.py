"""Parts of a model that no piece knows, for the report: attention of another form, mixtures of
experts, quantized layers. They run as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import nn

from stepscope.acceleration.replacement import Left

_ATTENTION = re.compile("attention|attn|mha", re.IGNORECASE)
_EXPERTS = re.compile("moe|experts", re.IGNORECASE)


def unrecognized(model: nn.Module, known_attention: Iterable[str]) -> list[Left]:
    """Return what is left. `known_attention` has the names of the attention modules that were
    replaced, or left for a reason of their own."""
    left = [
        Left("attention", name, "this form of attention is not known")
        for name in _innermost(model, _ATTENTION)
        if not any(_is_within(name, one) or _is_within(one, name) for one in known_attention)
    ]
    left += [Left("MLP", name, "a mixture of experts") for name in _innermost(model, _EXPERTS)]
    return left


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
