"""Changes that apply to any model from outside: compilation, checkpointing, fused attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from stepscope.acceleration.attention.substitute import fused_attention


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the repeated blocks of a model: every entry of its outermost `ModuleList`s."""
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
    """Compile the model in place and return the number of compiled modules. `how` is `model`,
    `block` (each block separately) or `graphs` (the model, with CUDA graphs of torch.compile). With
    `attention`, naive attention is replaced by a fused kernel."""
    keywords: dict[str, Any] = {"mode": "reduce-overhead" if how == "graphs" else mode}
    if attention is not None:
        keywords = {"backend": _with_fused_attention(attention, how)}
    modules = blocks_of(model) if how == "block" else [model]
    for module in modules:
        module.compile(**keywords)
    return len(modules)


def _with_fused_attention(attention: fused_attention, how: str) -> Callable[..., Any]:
    """Return the graph backend with one pass, which counts what it replaces."""
    from stepscope.acceleration.backend import Graphs

    graphs = Graphs(
        passes=("attention",),
        regions=False,
        compiler="inductor-cudagraphs" if how == "graphs" else "inductor",
    )

    def backend(module: Any, inputs: Any) -> Any:
        compiled = graphs(module, inputs)
        attention.substituted += len(graphs.reports[-1].applied)
        return compiled

    return backend


def checkpoint_blocks(model: torch.nn.Module) -> int:
    """Checkpoint every repeated block: it saves only its inputs and is recomputed in the backward.
    Return the number of blocks."""
    import torch
    from torch.utils.checkpoint import checkpoint

    blocks = blocks_of(model)
    for block in blocks:
        forward = block.forward

        def checkpointed(*arguments: Any, plain: Any = forward, **keywords: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*arguments, **keywords)
            return checkpoint(plain, *arguments, use_reentrant=False, **keywords)

        block.forward = checkpointed
    return len(blocks)


def one_kernel_attention() -> fused_attention:
    """Create a mode that fuses naive attention. Call this before the model is created, so that the
    mode also applies when checkpointed segments are recomputed."""
    from stepscope.acceleration.attention.recompute import follow_into_checkpoints
    from stepscope.acceleration.attention.substitute import fused_attention

    follow_into_checkpoints()
    return fused_attention()
