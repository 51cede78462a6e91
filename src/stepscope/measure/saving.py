"""Autograd's saved-tensor hooks around code that may refuse to run under hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def seen_while_allowed(
    pack: Callable[[torch.Tensor], torch.Tensor], give_up: Callable[[], None]
) -> Iterator[None]:
    """Call `pack` for every saved tensor, until code inside refuses to run under hooks, as
    torch.func.grad does. Then remove the hooks and call `give_up`."""
    autograd: Any = torch._C._autograd
    disable = autograd._saved_tensors_hooks_disable
    active = True

    def disable_without_ours(*given: Any, **named: Any) -> None:
        nonlocal active
        # The program may have pushed hooks on top, and the hooks are thread-local.
        top = autograd._top_saved_tensors_default_hooks(True)
        if active and top is not None and top[0] is pack:
            autograd._pop_saved_tensors_default_hooks()
            active = False
            give_up()
        disable(*given, **named)

    autograd._push_saved_tensors_default_hooks(pack, lambda packed: packed)
    autograd._saved_tensors_hooks_disable = disable_without_ours
    try:
        yield
    finally:
        autograd._saved_tensors_hooks_disable = disable
        if active:
            autograd._pop_saved_tensors_default_hooks()
