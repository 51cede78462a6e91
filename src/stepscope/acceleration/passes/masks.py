"""Masks as rules of an attention: causal, window, documents, prefix, and keys that are hidden from
all queries, such as padding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from stepscope.acceleration.passes.conditions import can_be_computed
from stepscope.acceleration.passes.formulas import (
    ALWAYS,
    Absolute,
    AtMostZero,
    Both,
    Condition,
    Either,
    Flag,
    Linear,
    Load,
    Penalty,
    Zero,
    both,
    integer,
    variable,
    variables,
)
from stepscope.acceleration.passes.matching import has_gradient
from stepscope.acceleration.passes.positions import dtype_of, formula_of, visibility_of

aten = torch.ops.aten
_DISTANCE = variable("q") - variable("k")


_KEYS, _QUERIES = frozenset("bk"), frozenset("bq")


@dataclass(frozen=True)
class MaskRules:
    """Visible keys of a query: those up to it, those within a window, those of its document."""

    is_causal: bool = False
    window: int | None = None
    documents: Node | None = None
    """Integers (seq,) or (batch, seq) that never decrease."""
    prefix: Linear | None = None
    """Number of leading keys that every query sees despite the causal mask: a number, or an element
    of a tensor for each b."""
    keys: Condition = ALWAYS
    """Keys that are visible to some query: a condition of b and k."""
    queries: Condition = ALWAYS
    """Queries that see keys at all: a condition of b and q."""

    @property
    def needs_intervals(self) -> bool:
        """True if a causal mask is not enough."""
        return (
            any(x is not None for x in (self.window, self.documents, self.prefix))
            or self.keys != ALWAYS
        )

    @property
    def has_positions(self) -> bool:
        """True if visibility depends on the positions of a query and a key together."""
        return self.is_causal or self.window is not None or self.documents is not None

    @property
    def may_hide_all(self) -> bool:
        """True if there may be queries without a visible key."""
        return self.keys != ALWAYS or self.queries != ALWAYS


def rules_of_mask(mask: Node) -> MaskRules | None:
    """Return the rules that hide the same keys as a mask over as many queries as keys, or None.

    Additive masks of finite numbers may hide no query's last key: it would see all of them, with a
    gradient.
    """
    slopes = slopes_of_mask(mask)
    found = visibility_of(mask) if slopes is None else slopes.visibility
    if found is None:
        return None
    condition, hidden = found
    rules = rules_of(condition)
    if rules is None or not all(map(can_be_computed, (rules.keys, rules.queries))):
        return None
    return None if rules.may_hide_all and hidden not in (None, -math.inf) else rules


@dataclass(frozen=True)
class Slopes:
    """ALiBi: a penalty for the distance from a query to a key, for each head."""

    mask: Node
    weights: Load
    factor: float
    needs_causal: bool
    """True if it is a penalty only for keys up to the query's position."""
    visibility: tuple[Condition, float | None]
    """Where the mask shows keys, and its score elsewhere: None if it shows all."""

    def times(self, factor: float) -> Slopes:
        return replace(self, factor=self.factor * factor)


def slopes_of_mask(mask: Node) -> Slopes | None:
    """Return the slopes of a mask that adds a penalty in proportion to the distance of a key. What
    is the same for all keys of a query does not count."""
    value = formula_of(mask)
    if not isinstance(value, Penalty):
        return None
    load, factor = value.weight.load, value.weight.factor
    visibility = value.condition, value.hidden
    names = [variables(index) for index in load.index if not index.is_constant]
    if names != [frozenset("h")] or has_gradient(load.tensor) or not can_be_computed(Flag(load)):
        return None
    if isinstance(value.distance, Absolute):
        if value.distance.of not in (_DISTANCE, _DISTANCE.times(-1)):
            return None
        return Slopes(mask, load, -factor * value.distance.sign, False, visibility)
    of_key = dict(value.distance.terms).pop("k", 0)
    if not of_key or not variables(value.distance) <= {"k", "q"}:
        return None
    return Slopes(mask, load, factor * of_key, True, visibility)


def rules_of(condition: Condition) -> MaskRules | None:
    """Return the rules under which a key is visible where the condition is true."""
    before: int | None = None
    after: int | None = None
    documents, prefix = None, None
    keys: Condition = ALWAYS
    queries: Condition = ALWAYS
    for part in condition.parts if isinstance(condition, Both) else (condition,):
        depends_on = variables(part)
        if part == ALWAYS:
            continue
        if depends_on <= _KEYS:
            keys = both(keys, part)
            continue
        if depends_on <= _QUERIES:
            queries = both(queries, part)
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
        if isinstance(part, Either) and prefix is None:
            prefix = _prefix(part)
            if prefix is not None:
                continue
        return None
    if (before is not None and before < 0) or (after is not None and after < 0):
        return None  # A query that does not see its own key.
    if prefix is not None:
        if (before, after, documents) != (None, None, None):
            return None
        return MaskRules(True, prefix=prefix, keys=keys, queries=queries)
    if after != 0 and before != after:
        return None
    window = None if before is None else before + 1
    return MaskRules(after == 0, window, documents, keys=keys, queries=queries)


def _prefix(either: Either) -> Linear | None:
    """Return the number of leading keys that are visible besides those up to the query."""
    if len(either.parts) != 2 or (causal := AtMostZero(variable("k") - variable("q"))) not in (
        either.parts
    ):
        return None
    (other,) = either.parts - {causal}
    if not isinstance(other, AtMostZero):
        return None
    number = variable("k") + integer(1) - other.value  # k + 1 - number <= 0
    terms = [(term, factor) for term, factor in number.terms]
    if not terms:
        return number
    ((term, factor), *more) = terms
    single = isinstance(term, Load) and term.index == (variable("b"),)
    return number if single and not more and (factor, number.constant) == (1, 0) else None


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
