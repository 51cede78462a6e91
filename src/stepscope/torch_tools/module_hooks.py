"""Hooks of all modules: `torch.nn.modules.module.register_module_forward_hook` and its siblings."""

from __future__ import annotations

from torch.nn.modules import module as of_torch

_REGISTRIES = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def has_global_hooks() -> bool:
    """Return whether a call of any module does more than its forward."""
    return any(getattr(of_torch, name) for name in _REGISTRIES)
