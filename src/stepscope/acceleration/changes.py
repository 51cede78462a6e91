"""Changes that any model can be given from outside, for models of one's own and for scripts."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from stepscope.acceleration.attention.substitute import fused_attention


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What is repeated: every entry of its outermost lists of modules."""
    import torch

    if isinstance(model, torch.nn.ModuleList):
        return list(model)
    return [block for part in model.children() for block in blocks_of(part)]


def compile_own(
    model: torch.nn.Module,
    how: str,
    attention: fused_attention | None = None,
    mode: str = "default",
) -> int:
    """Compile the `model`, or each `block` of it, and return how many modules that were; `graphs`
    is the model with CUDA graphs of torch.compile. With `attention`, naive attention is one
    kernel."""
    keywords: dict[str, Any] = {"mode": "reduce-overhead" if how == "graphs" else mode}
    if attention is not None:
        from stepscope.acceleration.attention.graph import backend

        keywords = {"backend": functools.partial(backend, within=attention, how=how)}
    modules = blocks_of(model) if how == "block" else [model]
    for module in modules:
        module.compile(**keywords)
    return len(modules)


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


def one_kernel_attention() -> fused_attention:
    """Made before the model, whose checkpointed stretches it is to follow."""
    from stepscope.acceleration.attention.recompute import follow_into_checkpoints
    from stepscope.acceleration.attention.substitute import fused_attention

    follow_into_checkpoints()
    return fused_attention()
