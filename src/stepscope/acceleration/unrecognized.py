"""Parts of a model that no formula recognizes: attention of another form, by the name of its class
or what its forward calls, and mixtures of experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from stepscope.acceleration.replacement import Left

_ATTENTION = re.compile("attention|attn|mha", re.IGNORECASE)
_ATTENTION_CALLS = {"softmax", "scaled_dot_product_attention"}
_EXPERTS = re.compile("moe|experts", re.IGNORECASE)


def unrecognized_attention(model: nn.Module, known: Iterable[str]) -> Iterator[str]:
    """Yield the names of attention modules, without the `known` ones, those within them and those
    around them."""
    for name in _innermost(model, _is_attention):
        if not any(_is_within(name, one) or _is_within(one, name) for one in known):
            yield name


def mixtures_of_experts(model: nn.Module) -> list[Left]:
    names = _innermost(model, lambda module: bool(_EXPERTS.search(type(module).__name__)))
    return [Left("MLP", name, "a mixture of experts") for name in names]


def _is_attention(module: nn.Module) -> bool:
    kind: Any = type(module)
    if _EXPERTS.search(kind.__name__) or hasattr(module, "experts"):
        return False
    code = getattr(kind.forward, "__code__", None)
    called = set() if code is None else {*code.co_names}
    return bool(_ATTENTION.search(kind.__name__)) or not called.isdisjoint(_ATTENTION_CALLS)


def _innermost(model: nn.Module, matches: Callable[[nn.Module], bool]) -> Iterator[str]:
    """Yield the names of modules with parameters that match, without those that contain another
    one."""
    names = [
        name
        for name, module in model.named_modules()
        if name and matches(module) and any(True for _ in module.parameters())
    ]
    for name in names:
        if not any(other != name and _is_within(other, name) for other in names):
            yield name


def _is_within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")
