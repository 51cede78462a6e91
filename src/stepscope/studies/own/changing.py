"""Changes that any model can be given from outside, for models of one's own and for scripts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from stepscope.attention.substitute import written_out_as_one_kernel

Context = Callable[[], AbstractContextManager[Any]]


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What is repeated: every entry of its outermost lists of modules."""
    import torch

    found: list[torch.nn.Module] = []
    for part in model.children():
        if isinstance(part, torch.nn.ModuleList):
            found += list(part)
        else:
            found += blocks_of(part)
    return found


def compile_own(
    model: torch.nn.Module, how: str, attention: written_out_as_one_kernel | None = None
) -> None:
    """`graphs` are torch's own CUDA graphs. With `attention`, what is written out is one kernel."""
    keywords: dict[str, Any] = {}
    if how == "graphs":
        keywords["mode"] = "reduce-overhead"
    if attention is not None:
        from stepscope.attention.substitute_graph import backend

        keywords = {"backend": functools.partial(backend, within=attention, how=how)}
    if how in ("model", "graphs"):
        model.compile(**keywords)
    elif how == "block":
        for block in blocks_of(model):
            block.compile(**keywords)


def checkpoint_blocks(model: torch.nn.Module) -> int:
    """Every repeated block keeps its inputs only and runs again in the backward: how many."""
    import torch
    from torch.utils.checkpoint import checkpoint

    blocks = blocks_of(model)
    for block in blocks:
        forward = block.forward

        def again(*arguments: Any, plain: Any = forward, **keywords: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*arguments, **keywords)
            return checkpoint(plain, *arguments, use_reentrant=False, **keywords)

        block.forward = again
    return len(blocks)


def call_within(model: torch.nn.Module, context: Context) -> None:
    """Every call of the model is made within it, outside of what is compiled of the model."""
    kind = type(model)

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        with context():
            return kind.__call__(self, *arguments, **keywords)

    # A method of the class: Python looks for __call__ nowhere else.
    model.__class__ = type(
        kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__}
    )


def one_kernel_attention() -> written_out_as_one_kernel:
    from stepscope.attention.substitute import written_out_as_one_kernel

    return written_out_as_one_kernel()
