"""Whether the pieces of `accelerate` replace the blocks of a model as a whole.

Where they do (Llama, Qwen2, GPT-2, ViT), replaced modules are as fast as the compiler's graph or a
few percent faster. Where parts of a block stay, the graph is ahead: it sees through every class.
"""

from __future__ import annotations

from collections.abc import Collection

from stepscope.acceleration.pieces import (
    attention,
    linear,
    mlp,
    residual_block,
)
from stepscope.acceleration.replacement import Left, Replacement, settings_of

_PARTS = (attention.PIECE, mlp.GATED, mlp.PLAIN_MLP)


def has_known_blocks(found: Collection[Replacement], left: Collection[Left]) -> bool:
    """Return whether attention and MLP of every block are replaced, and all blocks are alike: one
    with other settings, such as a window, needs another mask or kernel."""
    blocks = tuple(f"{one.name}." for one in found if one.piece == residual_block.PIECE)
    parts = [one for one in found if one.piece in _PARTS]
    attended = [one for one in parts if one.piece == attention.PIECE]
    kinds = {(type(one.module), repr(settings_of(one.module))) for one in attended}
    return (
        bool(blocks)
        and len(kinds) == 1
        and len(parts) == 2 * len(attended)
        and not any(one.piece == linear.PIECE and one.name.startswith(blocks) for one in found)
        and not any(one.piece in (residual_block.PIECE, *_PARTS) for one in left)
    )
