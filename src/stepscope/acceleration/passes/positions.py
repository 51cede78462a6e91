"""Evaluates mask tensors of a graph as formulas of positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from stepscope.acceleration.passes.formulas import (
    ALWAYS,
    Absolute,
    AtMostZero,
    Both,
    Choice,
    Condition,
    Either,
    Flag,
    Linear,
    Load,
    Not,
    Penalty,
    Value,
    Weight,
    Zero,
    as_float,
    at_most_zero,
    both,
    chosen,
    compared,
    either,
    integer,
    negated,
    variable,
)
from stepscope.acceleration.passes.matching import memory_of, number_of, written_memory

aten = torch.ops.aten
Index = tuple[Linear, ...]
HIDDEN = -1e8
"""A score from which on a key has no weight next to one with a usual score."""
_NARROW = (torch.uint8, torch.int8, torch.int16)
"""Integers whose sums may wrap around."""
_MAX_NODES = 400
"""Nodes visited for one mask: a mask from positions has a few dozen."""


class UnknownValueError(Exception):
    """A value does not follow from positions."""


def visibility_of(mask: Node) -> tuple[Condition, float | None] | None:
    """Return where a mask shows keys, and the score that it adds elsewhere, None if it is boolean.
    Nothing is returned if it is not known."""
    value = formula_of(mask)
    if isinstance(value, Choice):
        return _zero_or_hidden(value)
    return (value, None) if _is_condition(value) else None  # type: ignore[return-value]


def formula_of(mask: Node) -> Value | None:
    """Return an element of a mask as a formula of the variables b, h, q and k, which index its last
    four dimensions, or None if it is not known."""
    names = ("b", "h", "q", "k")
    shape = shape_of(mask)
    if not 2 <= len(shape) <= 4:
        return None
    index = tuple(
        integer(0) if size == 1 else variable(name)
        for name, size in zip(names[4 - len(shape) :], shape, strict=True)
    )
    try:
        return _Evaluation(mask.graph).value(mask, index)
    except UnknownValueError:
        return None


def _zero_or_hidden(value: Choice) -> tuple[Condition, float] | None:
    """Return where an additive mask is 0, if it hides keys elsewhere."""
    if value.if_true == 0.0 and value.if_false <= HIDDEN:
        return value.condition, value.if_false
    if value.if_false == 0.0 and value.if_true <= HIDDEN:
        return negated(value.condition), value.if_true
    return None


def shape_of(node: Any) -> tuple[Any, ...]:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def dtype_of(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _is_condition(value: Any) -> bool:
    return isinstance(value, AtMostZero | Zero | Flag | Not | Both | Either)


class _Evaluation:
    """One evaluation, which visits a bounded number of nodes. Values of tensors that some operator
    writes to are unknown: they depend on when they are read."""

    def __init__(self, graph: Graph) -> None:
        self._visited = 0
        self._written = written_memory(graph)

    def value(self, node: Any, index: Index) -> Value:
        """Return the element of a node's tensor at an index."""
        if not isinstance(node, Node):
            return _constant(node)
        self._visited += 1
        if self._visited > _MAX_NODES or memory_of(node)[-1] in self._written:
            raise UnknownValueError
        if not shape_of(node) and (number := number_of(node)) is not None:
            return _constant(number)
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is not None:
            try:
                return rule(self, node, index)
            except UnknownValueError:
                pass
        return _loaded(node, index)

    def operand(self, node: Any, operator: Node, index: Index) -> Value:
        """Return an operand's element for the element of an elementwise operator at an index."""
        shape = shape_of(node)
        if not isinstance(node, Node) or not shape:
            return self.value(node, ())
        del operator
        trailing = index[len(index) - len(shape) :]
        return self.value(
            node, tuple(integer(0) if n == 1 else i for n, i in zip(shape, trailing, strict=True))
        )


def _constant(value: Any) -> Value:
    if isinstance(value, bool):
        return ALWAYS if value else Either(frozenset())
    if isinstance(value, int):
        return integer(value)
    if isinstance(value, float):
        return integer(int(value)) if value.is_integer() else value
    raise UnknownValueError


def _loaded(node: Node, index: Index) -> Value:
    if not isinstance(node.meta.get("val"), torch.Tensor) or node.op == "get_attr":
        raise UnknownValueError  # Constants are read by a copy.
    load = Load(node, index)
    dtype = dtype_of(node)
    if dtype == torch.bool:
        return Flag(load)
    if dtype.is_floating_point:
        return Weight(load)
    if dtype.is_complex:
        raise UnknownValueError
    return Linear.of({load: 1})


Rule = Callable[[_Evaluation, Node, Index], Value]
_RULES: dict[Any, Rule] = {}


def _rule(*targets: Any) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(targets, function))
        return function

    return register


def _dim(node: Node, position: int, default: int | None = None) -> int:
    """Return a dimension among the arguments, counted from the front of the input."""
    dim = node.args[position] if len(node.args) > position else default
    size = len(shape_of(node.args[0]))
    if not isinstance(dim, int):
        raise UnknownValueError
    return dim % size


@_rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(_: _Evaluation, node: Node, index: Index) -> Value:
    given = list(node.args)
    start, step = 0, 1
    if len(given) >= 2:
        start = given[0]  # type: ignore[assignment]
    if len(given) == 3:
        step = given[2]  # type: ignore[assignment]
    if not (type(start) is int and type(step) is int):
        raise UnknownValueError
    return index[0].times(step) + integer(start)


@_rule(aten.ones.default, aten.new_ones.default, aten.ones_like.default)
def _ones(_: _Evaluation, node: Node, index: Index) -> Value:
    del index
    return ALWAYS if dtype_of(node) == torch.bool else integer(1)


@_rule(aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
def _zeros(_: _Evaluation, node: Node, index: Index) -> Value:
    del index
    return Either(frozenset()) if dtype_of(node) == torch.bool else integer(0)


@_rule(aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default)
def _full(_: _Evaluation, node: Node, index: Index) -> Value:
    del index
    position = {aten.scalar_tensor.default: 0, aten.new_full.default: 2}.get(node.target, 1)  # type: ignore[call-overload]
    return _constant(node.args[position])


@_rule(aten.alias.default, aten.detach.default, aten.contiguous.default, aten.clone.default,
       aten.lift_fresh_copy.default)  # fmt: skip
def _same(by: _Evaluation, node: Node, index: Index) -> Value:
    return by.value(node.args[0], index)


@_rule(aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default,
       aten._to_copy.default)  # fmt: skip
def _cast(by: _Evaluation, node: Node, index: Index) -> Value:
    value = by.value(node.args[0], index)
    if dtype_of(node) != torch.bool and _is_condition(value):
        return Choice(value, 1.0, 0.0)  # type: ignore[arg-type]
    if dtype_of(node) == torch.bool and not _is_condition(value):
        nonzero = compared("ne", value, integer(0))  # type: ignore[arg-type]
        if nonzero is None:
            raise UnknownValueError
        return nonzero
    if isinstance(value, Weight | Penalty) and not dtype_of(node).is_floating_point:
        raise UnknownValueError
    if dtype_of(node) in _NARROW and isinstance(value, Linear) and not value.is_constant:
        raise UnknownValueError
    return value


@_rule(aten.unsqueeze.default)
def _unsqueeze(by: _Evaluation, node: Node, index: Index) -> Value:
    dim = node.args[1]
    if not isinstance(dim, int):
        raise UnknownValueError
    dim %= len(index)
    return by.value(node.args[0], index[:dim] + index[dim + 1 :])


@_rule(aten.expand.default, aten.expand_as.default)
def _expand(by: _Evaluation, node: Node, index: Index) -> Value:
    return by.operand(node.args[0], node, index)


@_rule(aten.view.default, aten.reshape.default, aten.squeeze.default, aten.squeeze.dim,
       aten._unsafe_view.default)  # fmt: skip
def _reshape(by: _Evaluation, node: Node, index: Index) -> Value:
    """Dimensions of size one come or go; others stay as they are."""
    source, target = shape_of(node.args[0]), shape_of(node)
    kept = [i for i, size in zip(index, target, strict=True) if size != 1]
    if [n for n in source if n != 1] != [n for n in target if n != 1]:
        raise UnknownValueError
    remaining = iter(kept)
    return by.value(node.args[0], tuple(integer(0) if n == 1 else next(remaining) for n in source))


@_rule(aten.permute.default)
def _permute(by: _Evaluation, node: Node, index: Index) -> Value:
    order: Sequence[int] = node.args[1]  # type: ignore[assignment]
    inverse = {dim % len(index): index[at] for at, dim in enumerate(order)}
    return by.value(node.args[0], tuple(inverse[dim] for dim in range(len(index))))


@_rule(aten.transpose.int, aten.t.default)
def _transpose(by: _Evaluation, node: Node, index: Index) -> Value:
    first, second = (_dim(node, 1, 0), _dim(node, 2, 1))
    swapped = list(index)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    return by.value(node.args[0], tuple(swapped))


@_rule(aten.slice.Tensor)
def _slice(by: _Evaluation, node: Node, index: Index) -> Value:
    dim = _dim(node, 1, 0)
    start = node.args[2] if len(node.args) > 2 else 0
    step = node.args[4] if len(node.args) > 4 else 1
    start = 0 if start is None else start
    if type(start) is not int or type(step) is not int or start < 0:
        raise UnknownValueError
    moved = index[dim].times(step) + integer(start)
    return by.value(node.args[0], (*index[:dim], moved, *index[dim + 1 :]))


@_rule(aten.select.int)
def _select(by: _Evaluation, node: Node, index: Index) -> Value:
    dim, at = _dim(node, 1), node.args[2]
    if type(at) is not int or at < 0:
        raise UnknownValueError
    return by.value(node.args[0], (*index[:dim], integer(at), *index[dim:]))


@_rule(aten.index.Tensor)
def _gather(by: _Evaluation, node: Node, index: Index) -> Value:
    """`x[i, j, …]` with an index tensor for each dimension. Indices are variables or constants, so
    that none is negative, which would count from the end."""
    source, indices = node.args[0], node.args[1]
    if not isinstance(indices, list | tuple) or len(indices) != len(shape_of(source)):
        raise UnknownValueError
    gathered = []
    for one in indices:
        value = by.operand(one, node, index) if isinstance(one, Node) else None
        if not isinstance(value, Linear) or not _is_plain(value):
            raise UnknownValueError
        gathered.append(value)
    return by.value(source, tuple(gathered))


def _is_plain(value: Linear) -> bool:
    coefficients = [c for _, c in value.terms]
    names = all(isinstance(term, str) for term, _ in value.terms)
    return names and value.constant >= 0 and coefficients in ([], [1])


def _numbers(by: _Evaluation, node: Node, index: Index) -> list[Value]:
    if dtype_of(node) in _NARROW:
        raise UnknownValueError
    return [by.operand(x, node, index) for x in node.args[:2]]


@_rule(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar)
def _add(by: _Evaluation, node: Node, index: Index) -> Value:
    if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
        raise UnknownValueError
    left, right = _numbers(by, node, index)
    if node.target is aten.rsub.Scalar:
        left, right = right, left
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Penalty) and isinstance(other, Choice) and _is_addition(node):
            shown = _zero_or_hidden(other)
            if shown is None or one.hidden is not None:
                raise UnknownValueError
            return replace(one, condition=shown[0], hidden=shown[1])
    return _combined(left, right, lambda a, b: a + b if _is_addition(node) else a - b)


def _is_addition(node: Node) -> bool:
    return node.target in (aten.add.Tensor, aten.add.Scalar)


@_rule(aten.mul.Tensor, aten.mul.Scalar)
def _mul(by: _Evaluation, node: Node, index: Index) -> Value:
    left, right = _numbers(by, node, index)
    if _is_condition(left) and _is_condition(right):
        return both(left, right)  # type: ignore[arg-type]
    if isinstance(right, Weight | Penalty):
        left, right = right, left
    if isinstance(left, Weight | Penalty):
        return _weighted(left, right)
    if isinstance(right, Linear) and not right.is_constant:
        left, right = right, left
    if isinstance(left, Linear) and isinstance(right, Linear) and right.is_constant:
        return left.times(right.constant)
    pair = [x for x in (left, right) if isinstance(x, Choice) and x.if_false == 0.0]
    if len(pair) == 2 and all(math.isfinite(x.if_true) for x in pair):
        condition = both(pair[0].condition, pair[1].condition)
        return Choice(condition, pair[0].if_true * pair[1].if_true, 0.0)
    return _combined(left, right, lambda a, b: a * b)


def _weighted(left: Weight | Penalty, right: Value) -> Value:
    """Return the product of a weight and a number or distance."""
    number = as_float(right)
    if isinstance(left, Weight):
        if number is not None:
            return Weight(left.load, left.factor * number)
        if isinstance(right, Linear | Absolute):
            return Penalty(left, right)
    elif number is not None and left.hidden is None:
        return replace(left, weight=replace(left.weight, factor=left.weight.factor * number))
    raise UnknownValueError


def _combined(left: Value, right: Value, operation: Callable[[Any, Any], Any]) -> Value:
    """Return the sum, difference or product of formulas."""
    if isinstance(left, Linear) and isinstance(right, Linear):
        if left.is_constant and right.is_constant:
            return integer(operation(left.constant, right.constant))
        try:
            combined: Value = operation(left, right)
        except TypeError as error:
            raise UnknownValueError from error
        return combined
    if isinstance(left, Choice) and (number := as_float(right)) is not None:
        numbers = operation(left.if_true, number), operation(left.if_false, number)
        return _choice(left.condition, *numbers)
    if isinstance(right, Choice) and (number := as_float(left)) is not None:
        numbers = operation(number, right.if_true), operation(number, right.if_false)
        return _choice(right.condition, *numbers)
    raise UnknownValueError


def _choice(condition: Condition, if_true: float, if_false: float) -> Choice:
    if math.isnan(if_true) or math.isnan(if_false):
        raise UnknownValueError
    return Choice(condition, if_true, if_false)


@_rule(aten.neg.default)
def _negative(by: _Evaluation, node: Node, index: Index) -> Value:
    value = by.value(node.args[0], index)
    if isinstance(value, Weight | Penalty):
        return _weighted(value, -1.0)
    if isinstance(value, Absolute):
        return replace(value, sign=-value.sign)
    return _combined(integer(0), value, lambda a, b: a - b)


@_rule(aten.abs.default)
def _absolute(by: _Evaluation, node: Node, index: Index) -> Value:
    value = by.value(node.args[0], index)
    if not isinstance(value, Linear):
        raise UnknownValueError
    return Absolute(value)


def _comparison(name: str) -> Rule:
    def rule(by: _Evaluation, node: Node, index: Index) -> Value:
        left, right = _numbers(by, node, index)
        if _is_condition(left) or _is_condition(right):
            raise UnknownValueError
        condition = compared(name, left, right)  # type: ignore[arg-type]
        if condition is None:
            raise UnknownValueError
        return condition

    return rule


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _packet = getattr(aten, _name)
    _RULES[_packet.Tensor] = _RULES[_packet.Scalar] = _comparison(_name)


def _logical(combine: Callable[..., Condition]) -> Rule:
    def rule(by: _Evaluation, node: Node, index: Index) -> Value:
        parts = [by.operand(x, node, index) for x in node.args]
        if not all(map(_is_condition, parts)):
            raise UnknownValueError
        return combine(*parts)

    return rule


_RULES |= dict.fromkeys(
    (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default), _logical(both)
)
_RULES |= dict.fromkeys(
    (aten.__or__.Tensor, aten.bitwise_or.Tensor, aten.logical_or.default), _logical(either)
)
_RULES |= dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), _logical(negated))


@_rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(by: _Evaluation, node: Node, index: Index) -> Value:
    condition, if_true, if_false = (by.operand(x, node, index) for x in node.args)
    return _chosen(condition, if_true, if_false)


@_rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(by: _Evaluation, node: Node, index: Index) -> Value:
    otherwise, condition, filled = (by.operand(x, node, index) for x in node.args)
    return _chosen(condition, filled, otherwise)


def _chosen(condition: Value, if_true: Value, if_false: Value) -> Value:
    if not _is_condition(condition):
        raise UnknownValueError
    for one, other, shown in ((if_true, if_false, condition), (if_false, if_true, None)):
        hidden = as_float(other)
        if isinstance(one, Penalty) and one.hidden is None and hidden is not None:
            if hidden > HIDDEN:
                raise UnknownValueError
            where: Any = condition if shown is not None else negated(condition)  # type: ignore[arg-type]
            return replace(one, condition=where, hidden=hidden)
    value = chosen(condition, if_true, if_false)  # type: ignore[arg-type]
    if value is None:
        raise UnknownValueError
    return value


@_rule(aten.tril.default, aten.triu.default)
def _triangle(by: _Evaluation, node: Node, index: Index) -> Value:
    diagonal = node.args[1] if len(node.args) > 1 else 0
    if type(diagonal) is not int:
        raise UnknownValueError
    above = index[-1] - index[-2] - integer(diagonal)
    kept = at_most_zero(above if node.target is aten.tril.default else above.times(-1))
    value = by.value(node.args[0], index)
    zero: Value = Either(frozenset()) if _is_condition(value) else integer(0)
    return _chosen(kept, value, zero)


@_rule(aten.diff.default)
def _differences(by: _Evaluation, node: Node, index: Index) -> Value:
    """The differences of a sequence that grows by a constant, with a first element before it."""
    given = [*node.args, *[None] * (5 - len(node.args))]
    source, order, dim, before, after = given
    dim = -1 if dim is None else dim
    if order not in (1, None) or after is not None or not isinstance(dim, int) or before is None:
        raise UnknownValueError
    dim %= len(index)
    if shape_of(before)[dim] != 1:
        raise UnknownValueError

    def element(node: Any, at: Linear) -> Linear:
        value = by.value(node, (*index[:dim], at, *index[dim + 1 :]))
        if not isinstance(value, Linear):
            raise UnknownValueError
        return value

    slope = element(source, variable("_") + integer(1)) - element(source, variable("_"))
    start = element(source, integer(0)) - element(before, integer(0))
    if not slope.is_constant or slope != start:
        raise UnknownValueError
    return slope


@_rule(aten.cumsum.default)
def _cumulated(by: _Evaluation, node: Node, index: Index) -> Value:
    """The cumulative sum of zeros."""
    value = by.value(node.args[0], index)
    if value in (Either(frozenset()), integer(0)):
        return integer(0)
    raise UnknownValueError
