"""Hooks of all modules (`torch.nn.modules.module.register_module_forward_hook` and its siblings),
and hooks that observe one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
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


class Hook:
    """Forwards calls to a callback, in the model where it was registered.

    In a copy of that model, and in a model that was saved and loaded, a builtin that does nothing
    replaces it: the file can be loaded where stepscope is not installed.
    """

    def __init__(self, callback: Callable[..., None]) -> None:
        self._callback = callback

    def __call__(self, *given: Any) -> None:
        self._callback(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        # Both `copy` and `pickle` use this method.
        return getattr, (nullcontext(), "__exit__")


class OptionalHook(Hook):
    """A hook that compiled code leaves out: what it tells is not worth a slower step."""

    def __call__(self, *given: Any) -> None:
        if not torch.compiler.is_compiling():
            super().__call__(*given)
