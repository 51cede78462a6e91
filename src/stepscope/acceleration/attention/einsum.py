"""An einsum of two batches of matrices as a matmul."""

from __future__ import annotations

import string
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.acceleration.attention.deferred import Deferred

Order = list[int] | None
"""A permutation of dimensions; None: as they are."""


class MatmulOrders(NamedTuple):
    """The orders in which the dimensions of both operands are those of a matmul, and the order of
    the dimensions of the matmul in the output."""

    left: Order
    right: Order
    out: Order


def matmul_orders(equation: str, left: int, right: int) -> MatmulOrders | None:
    """Return how an einsum of operands with so many dimensions is a matmul; None if it is not."""
    inputs, _, out = equation.replace(" ", "").replace("...", ".").partition("->")
    first, _, second = inputs.partition(",")
    more = left - len(first.replace(".", ""))
    if more != right - len(second.replace(".", "")) or not 0 <= more <= len(string.digits):
        return None
    first, second, out = (
        labels.replace(".", string.digits[:more]) for labels in (first, second, out)
    )
    if any(len(set(labels)) != len(labels) for labels in (first, second, out)):
        return None
    batch = [label for label in out if label in first and label in second]
    row = [label for label in out if label in first and label not in second]
    column = [label for label in out if label in second and label not in first]
    summed = [label for label in first if label in second and label not in out]
    if not batch or not len(row) == len(column) == len(summed) == 1:
        return None
    dimensions = len(batch) + 2
    if not len(first) == len(second) == len(out) == left == right == dimensions:
        return None
    return MatmulOrders(
        _order(first, [*batch, *row, *summed]),
        _order(second, [*batch, *summed, *column]),
        _order([*batch, *row, *column], out),
    )


def as_matmul(arguments: tuple[Any, ...]) -> tuple[tuple[Any, Any], Order] | None:
    """Return the operands of the matmul that an einsum with these arguments computes, and the order
    of its dimensions in the output; None if it is no such matmul. An operand that is not a tensor
    has to be in the order of the matmul."""
    if len(arguments) != 3 or not isinstance(arguments[0], str):
        return None
    equation, left, right = arguments
    if not (isinstance(left, Tensor | Deferred) and isinstance(right, Tensor | Deferred)):
        return None
    with torch._C.DisableTorchFunction():
        orders = matmul_orders(equation, left.dim(), right.dim())
        if orders is None:
            return None
        operands = _permuted(left, orders.left), _permuted(right, orders.right)
    return None if any(one is None for one in operands) else (operands, orders.out)


def _order(labels: str | list[str], wanted: str | list[str]) -> Order:
    order = [labels.index(label) for label in wanted]
    return None if order == sorted(order) else order


def _permuted(operand: Any, order: Order) -> Any:
    if order is None:
        return operand
    return operand.permute(order) if isinstance(operand, Tensor) else None
