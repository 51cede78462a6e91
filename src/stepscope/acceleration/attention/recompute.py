"""Attention as one kernel where a checkpointed stretch runs again: the backward has no mode on.

A stretch that kept other tensors in its forward than it makes the second time is an error to torch,
or gets its gradients from attention as it was written.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.utils.checkpoint
from torch.overrides import _get_current_function_mode_stack

from stepscope.acceleration.attention.substitute import fused_attention

_FOLLOWS = "_stepscope_follows"


def follow_into_checkpoints() -> None:
    """From now on, and before a program has the function under a name of its own."""
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

        def within(*given: Any, **named: Any) -> Any:
            # The first time too, so that what is still put off is made in the stretch both times.
            with active[-1]:
                return function(*given, **named)

        return plain(within, *arguments, **keywords)

    setattr(checkpoint, _FOLLOWS, True)
    torch.utils.checkpoint.checkpoint = checkpoint
