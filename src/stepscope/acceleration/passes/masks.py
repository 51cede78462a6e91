"""Masks that follow from positions, as rules of an attention: causal, window, documents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from stepscope.acceleration.passes.formulas import (
    ALWAYS,
    AtMostZero,
    Both,
    Condition,
    Linear,
    Load,
    Zero,
    integer,
    variable,
)
from stepscope.acceleration.passes.positions import condition_of, dtype_of

aten = torch.ops.aten
_DISTANCE = variable("q") - variable("k")


@dataclass(frozen=True)
class MaskRules:
    """Visible keys of a query: those up to it, those within a window, those of its document."""

    is_causal: bool = False
    window: int | None = None
    documents: Node | None = None
    """Integers (seq,) or (batch, seq) that never decrease."""

    @property
    def needs_intervals(self) -> bool:
        """True if a causal mask is not enough."""
        return self.window is not None or self.documents is not None


def rules_of_mask(mask: Node) -> MaskRules | None:
    """Return the rules that hide the same keys as a mask over as many queries as keys, or None."""
    condition = condition_of(mask)
    return None if condition is None else rules_of(condition)


def rules_of(condition: Condition) -> MaskRules | None:
    """Return the rules under which a key is visible where the condition is true."""
    before: int | None = None
    after: int | None = None
    documents = None
    for part in condition.parts if isinstance(condition, Both) else (condition,):
        if part == ALWAYS:
            continue
        if isinstance(part, AtMostZero):
            back, ahead = part.value - _DISTANCE, part.value + _DISTANCE
            if back.is_constant:  # q - k <= -constant
                before = _smaller(before, -back.constant)
                continue
            if ahead.is_constant:  # k - q <= -constant
                after = _smaller(after, -ahead.constant)
                continue
        if isinstance(part, Zero) and documents is None:
            documents = _documents(part.value)
            if documents is not None:
                continue
        return None
    if (before is not None and before < 0) or (after is not None and after < 0):
        return None  # A query that does not see its own key.
    if after == 0:
        return MaskRules(True, None if before is None else before + 1, documents)
    if before != after:
        return None
    return MaskRules(False, None if before is None else before + 1, documents)


def _smaller(known: int | None, bound: int) -> int:
    return bound if known is None else min(known, bound)


def _documents(difference: Linear) -> Node | None:
    """Return the tensor whose elements at the query and at the key are compared, if its values
    never decrease: only then are the keys of a document an interval."""
    terms = dict(difference.terms)
    if difference.constant or sorted(terms.values()) != [-1, 1]:
        return None
    first, second = terms
    if not isinstance(first, Load) or not isinstance(second, Load):
        return None
    tensor = first.tensor
    if tensor is not second.tensor or not _never_decreases(tensor):
        return None
    *lead, last = first.index
    *other_lead, other_last = second.index
    batch = [variable("b")] if len(lead) == 1 else []
    same_lead = lead == other_lead and (lead == batch or all(x == integer(0) for x in lead))
    positions = {last, other_last} == {variable("q"), variable("k")}
    return tensor if positions and same_lead and len(lead) <= 1 else None


def _never_decreases(node: Node) -> bool:
    """Return whether the elements never decrease along the last dimension: a cumulative sum of
    booleans."""
    if node.target is not aten.cumsum.default or node.args[1] not in (
        -1,
        len(node.meta["val"].shape) - 1,
    ):
        return False
    return any(dtype_of(x) == torch.bool for x in _through_casts(node.args[0]))


def _through_casts(node: object) -> Iterable[Node]:
    while isinstance(node, Node):
        yield node
        if node.target not in (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default):
            return
        node = node.args[0]
