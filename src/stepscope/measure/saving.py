"""Autograd's hooks for saved tensors, around code that may not run under any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def seen_while_allowed(
    pack: Callable[[torch.Tensor], torch.Tensor], give_up: Callable[[], None]
) -> Iterator[None]:
    """`pack` sees every tensor that is saved, until something inside refuses to run under hooks, as
    torch.func.grad does. Then they are taken off, and `give_up` is told."""
    autograd: Any = torch._C._autograd
    disable = autograd._saved_tensors_hooks_disable
    there = True

    def disable_without_ours(*given: Any, **named: Any) -> None:
        nonlocal there
        # The program may have put hooks of its own on top, and every thread has its own.
        top = autograd._top_saved_tensors_default_hooks(True)
        if there and top is not None and top[0] is pack:
            autograd._pop_saved_tensors_default_hooks()
            there = False
            give_up()
        disable(*given, **named)

    autograd._push_saved_tensors_default_hooks(pack, lambda packed: packed)
    autograd._saved_tensors_hooks_disable = disable_without_ours
    try:
        yield
    finally:
        autograd._saved_tensors_hooks_disable = disable
        if there:
            autograd._pop_saved_tensors_default_hooks()
