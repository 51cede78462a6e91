"""An einsum of two batches of matrices as a matmul."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ELLIPSIS = "."


def as_matmul(arguments: tuple[Any, ...]) -> tuple[tuple[Any, Any], list[int] | None] | None:
    """Return the operands of the matmul that an einsum with these arguments computes, and the order
    of the dimensions in its output (None: that of the matmul); None if it is no such matmul. An
    operand that is not a tensor has to be in the order of the matmul."""
    if len(arguments) != 3 or not isinstance(arguments[0], str):
        return None
    equation, left, right = arguments
    inputs, _, out = equation.replace(" ", "").replace("...", _ELLIPSIS).partition("->")
    first, _, second = inputs.partition(",")
    if any(len(set(labels)) != len(labels) for labels in (first, second, out)):
        return None
    batch = [label for label in out if label in first and label in second]
    row = [label for label in out if label in first and label not in second]
    column = [label for label in out if label in second and label not in first]
    summed = [label for label in first if label in second and label not in out]
    if not batch or not len(row) == len(column) == len(summed) == 1:
        return None
    if any(len(labels) != len(batch) + 2 for labels in (first, second, out)):
        return None
    operands = (
        _in_order(left, first, [*batch, *row, *summed]),
        _in_order(right, second, [*batch, *summed, *column]),
    )
    order = _order([*batch, *row, *column], out)
    if any(one is None for one in operands) or (order is not None and _ELLIPSIS in out):
        return None
    return operands, order


def _order(labels: list[str], wanted: str) -> list[int] | None:
    order = [labels.index(label) for label in wanted]
    return None if order == sorted(order) else order


def _in_order(operand: Any, labels: str, wanted: list[str]) -> Any:
    """Return an operand with its dimensions in the wanted order; None if it cannot be permuted."""
    order = _order([*labels], "".join(wanted))
    if order is None:
        return operand
    if not isinstance(operand, Tensor):
        return None
    with torch._C.DisableTorchFunction():
        if _ELLIPSIS not in labels:
            return operand.permute(order)
        swapped = [*labels[:-2], labels[-1], labels[-2]] == wanted
        return operand.mT if swapped and labels[0] == _ELLIPSIS else None
