"""Changes that apply to any model from outside: compilation and checkpointing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from stepscope.acceleration.fused_attention import FusedAttention


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the repeated blocks of a model: every entry of its outermost `ModuleList`s."""
    import torch

    if isinstance(model, torch.nn.ModuleList):
        return list(model)
    return [block for part in model.children() for block in blocks_of(part)]


def compile_own(
    model: torch.nn.Module,
    how: str,
    attention: FusedAttention | None = None,
    mode: str = "default",
) -> int:
    """Compile the model in place and return the number of compiled modules. `how` is `model`,
    `block` (each block separately) or `graphs` (the model, with CUDA graphs of torch.compile). With
    `attention`, naive attention is replaced by a fused kernel."""
    keywords: dict[str, Any] = {"mode": "reduce-overhead" if how == "graphs" else mode}
    if attention is not None:
        keywords = {"backend": attention.backend(how)}
    modules = blocks_of(model) if how == "block" else [model]
    for module in modules:
        module.compile(**keywords)
    return len(modules)


def checkpoint_blocks(model: torch.nn.Module) -> int:
    """Checkpoint every repeated block: it saves only its inputs and is recomputed in the backward.
    Return the number of blocks."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from stepscope.acceleration.forward_registry import Layer, add_layer

    def change(block: torch.nn.Module) -> None:
        def run(_: torch.nn.Module, *arguments: Any, **keywords: Any) -> Any:
            if not torch.is_grad_enabled():
                return layer.below(*arguments, **keywords)
            return checkpoint(layer.below, *arguments, use_reentrant=False, **keywords)

        layer: Layer = add_layer(block, run, checkpoint_blocks)

    blocks = blocks_of(model)
    for block in blocks:
        change(block)
    return len(blocks)
