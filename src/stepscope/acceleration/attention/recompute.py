"""Fused attention in the recomputation of checkpointed segments, where the mode is not active.

If a segment saved other tensors in its forward than its recomputation creates, torch raises an
error, or the gradients come from naive attention.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.utils.checkpoint
from torch.overrides import _get_current_function_mode_stack

from stepscope.acceleration.attention.substitute import fused_attention

_FOLLOWS = "_stepscope_follows"


def follow_into_checkpoints() -> None:
    """Patch `torch.utils.checkpoint.checkpoint`, before a program imports it under another name."""
    plain = torch.utils.checkpoint.checkpoint
    if getattr(plain, _FOLLOWS, False):
        return

    @functools.wraps(plain)
    def checkpoint(function: Any, *arguments: Any, **keywords: Any) -> Any:
        active = [
            mode
            for mode in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
            if isinstance(mode, fused_attention)
        ]
        if not active:
            return plain(function, *arguments, **keywords)

        def within(*args: Any, **kwargs: Any) -> Any:
            # Also in the forward, so that deferred matmuls are computed within the segment both
            # times.
            with active[-1]:
                return function(*args, **kwargs)

        return plain(within, *arguments, **keywords)

    setattr(checkpoint, _FOLLOWS, True)
    torch.utils.checkpoint.checkpoint = checkpoint
