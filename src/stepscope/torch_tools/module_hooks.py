"""Hooks of all modules: `torch.nn.modules.module.register_module_forward_hook` and its siblings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules import module as of_torch

_REGISTRIES = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def has_global_hooks() -> bool:
    """Return whether a call of any module does more than its forward."""
    return any(_registries())


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Call modules without them: probes are not calls of the program's modules."""
    hooks = [(registry, registry.copy()) for registry in _registries()]
    for registry, _ in hooks:
        registry.clear()
    try:
        yield
    finally:
        for registry, before in hooks:
            registry.update(before)


def _registries() -> list[dict[int, Any]]:
    return [getattr(of_torch, name) for name in _REGISTRIES]
