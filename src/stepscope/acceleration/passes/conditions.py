"""Conditions and integers of one position as nodes of a graph: where keys are visible."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from stepscope.acceleration.passes.formulas import (
    AtMostZero,
    Both,
    Condition,
    Flag,
    Linear,
    Load,
    Not,
    Term,
    Zero,
    integer,
    variable,
)

aten = torch.ops.aten
_DIMS = {"b": 0, "h": -3, "q": -2, "k": -1}
"""The dimension of a mask that a variable indexes."""


class ConditionTensors:
    """Adds the nodes that compute conditions, at the graph's insertion point: tensors (1 or batch,
    1 or length), whose length is that of dimension `name` of the mask."""

    def __init__(self, mask: Node, name: str) -> None:
        self._mask, self._name = mask, name

    def condition(self, condition: Condition) -> Node:
        match condition:
            case Flag(load):
                return self._load(load)
            case Not(of):
                return self._call(aten.logical_not.default, self.condition(of))
            case Zero(value):
                return self._call(aten.eq.Scalar, self.integer(value), 0)
            case AtMostZero(value):
                return self._call(aten.le.Scalar, self.integer(value), 0)
        parts = sorted(condition.parts, key=repr)
        operator = aten.logical_and if isinstance(condition, Both) else aten.logical_or
        return functools.reduce(
            lambda left, right: self._call(operator.default, left, right),
            map(self.condition, parts),
        )

    def integer(self, value: Linear) -> Node:
        terms = [
            self._call(aten.mul.Scalar, self._term(term), factor)
            for term, factor in sorted(value.terms, key=repr)
        ]
        total = functools.reduce(lambda a, b: self._call(aten.add.Tensor, a, b), terms)
        return self._call(aten.add.Scalar, total, value.constant)

    def weights(self, load: Load, factor: float) -> Node:
        """The elements of a load with one variable, times a factor, in float32: (length,)."""
        return self._call(_weights, self._load(load), factor)

    def _term(self, term: Term) -> Node:
        if isinstance(term, Load):
            return self._call(aten.to.dtype, self._load(term), torch.int64)
        return self._call(_positions, self._mask, _DIMS[term], term == "b")

    def _load(self, load: Load) -> Node:
        names, starts = [], []
        for index in load.index:
            of = [term for term, _ in index.terms]
            name = of[0] if of else None
            assert name is None or isinstance(name, str)
            assert index == (integer(0) if name is None else variable(name)) + integer(
                index.constant
            )
            names.append(name)
            starts.append(index.constant)
        return self._call(_read, load.tensor, self._mask, names, starts, self._name)

    def _call(self, target: object, *args: object) -> Node:
        return self._mask.graph.call_function(target, args)  # type: ignore[arg-type]


def _positions(mask: Tensor, dim: int, of_batch: bool) -> Tensor:
    at = torch.arange(mask.shape[dim], device=mask.device)
    return at[:, None] if of_batch else at[None]


def _read(
    x: Tensor, mask: Tensor, names: Sequence[str | None], starts: Sequence[int], name: str
) -> Tensor:
    """Return x[start + i, …], (1 or batch, 1 or length): `names` are the variables that index its
    dimensions, None for a constant."""
    kept: list[str] = []
    for dim in reversed(range(len(names))):
        of = names[dim]
        if of is None:
            x = x.select(dim, starts[dim])
        else:
            x = x.narrow(dim, starts[dim], mask.shape[_DIMS[of]])
            kept.insert(0, of)
    if kept == [name, "b"]:
        return x.transpose(0, 1)
    if kept == ["b"]:
        return x[:, None]
    return x if len(kept) == 2 else x.reshape(1, -1)


def _weights(x: Tensor, factor: float) -> Tensor:
    return x.flatten().to(torch.float32) * factor


def can_be_computed(condition: Condition | Linear) -> bool:
    """Return whether every element that a condition reads has an index of one position at most."""
    match condition:
        case Linear(terms):
            return all(not isinstance(term, Load) or _is_simple(term) for term, _ in terms)
        case Flag(load):
            return _is_simple(load)
        case Not(of):
            return can_be_computed(of)
        case AtMostZero(value) | Zero(value):
            return can_be_computed(value)
    return all(map(can_be_computed, condition.parts))


def _is_simple(load: Load) -> bool:
    """Return whether each dimension is indexed by a constant or by another variable plus one."""
    names = []
    for index in load.index:
        if index.constant < 0 or len(index.terms) > 1:
            return False
        for term, factor in index.terms:
            if not isinstance(term, str) or factor != 1:
                return False
            names.append(term)
    return len(set(names)) == len(names)
