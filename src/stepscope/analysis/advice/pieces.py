"""The pieces of `stepscope.accelerate` and their groups, which are settings of a trial."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum

ACCELERATE = "accelerate"
"""Value of a setting that `stepscope.accelerate` applies."""


class Group(StrEnum):
    """A setting of `stepscope.accelerate`: pieces that are one change. Together they are all of
    it."""

    NORM = "norm"
    MLP = "mlp"
    LINEAR = "linear"
    ATTENTION = "attention"
    LOSS = "loss"
    EMBEDDING = "embedding"
    OPTIMIZER = "optimizer"


NORM, MLP, LINEAR, ATTENTION, LOSS, EMBEDDING, OPTIMIZER = GROUPS = tuple(Group)
SDPA = "SDPA"
"""Entry among the recorded pieces: `accelerate` switches the model's attention to SDPA."""
_GROUP_OF = {
    "RMSNorm": NORM,
    "LayerNorm": NORM,
    "residual block": NORM,
    "gated MLP": MLP,
    "MLP": MLP,
    "linear": LINEAR,
    "attention": ATTENTION,
    "attention mask": ATTENTION,
    SDPA: ATTENTION,
    "head and loss": LOSS,
    "embedding": EMBEDDING,
    "patch embedding": EMBEDDING,
    "optimizer": OPTIMIZER,
}
"""The group of each piece, by the name that reports and records have."""
IN_BLOCKS = (NORM, MLP, LINEAR, ATTENTION)


def group_of(piece: str) -> Group:
    """Return the group of a piece: linear layers and all that are not known belong to `LINEAR`."""
    return _GROUP_OF.get(piece, LINEAR)


def excluded_pieces(pieces: Iterable[str], groups: Collection[str]) -> list[str]:
    """Return what `exclude` of `accelerate` has, so that of these pieces only the groups are
    replaced. A linear layer of an excluded piece would be one of its own."""
    names = [ATTENTION if piece == SDPA else piece for piece in pieces]
    left = [name for name in dict.fromkeys(names) if group_of(name) not in groups]
    if left and LINEAR not in groups:
        left = [*(name for name in left if name != LINEAR), LINEAR]
    return left
