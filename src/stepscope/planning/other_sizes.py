"""A step of fake tensors with another batch, or another context."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.analysis.predict.largest import largest_within
from stepscope.planning.fake_run import FakeStep


def length_of(batch: Any, dim: int = 0) -> int:
    """Return the length of the first tensor of a batch along a dimension; 0 if it has none."""
    first = next((x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.numel()), None)
    return 0 if first is None or first.dim() <= dim else first.shape[dim]


def resized(step: FakeStep, dim: int, length: int) -> FakeStep:
    """Repeat or cut the tensors of a batch that have its length along a dimension; for a context,
    up to a token that is the target of the last one alone."""
    before = length_of(step.batch, dim)
    step.model.zero_grad()
    if length == before:
        return step

    def other(leaf: Any) -> Any:
        size = leaf.shape[dim] if isinstance(leaf, Tensor) and leaf.dim() > dim else 0
        if not size or abs(size - before) > dim:
            return leaf
        rows = torch.arange(size + length - before) % size
        return leaf.detach().index_select(dim, rows).requires_grad_(leaf.requires_grad)

    return step._replace(batch=tree_map(other, step.batch))


def largest_batch(step: FakeStep, limit: float, needed: Callable[[FakeStep], float]) -> int:
    """Return the largest batch whose predicted need is within a limit; 0 if there is none, or the
    program cannot run other batches."""
    with suppress(Exception):
        # Such as a number of rows that is part of a loop's code.
        return largest_within(
            lambda rows: needed(resized(step, 0, rows)), length_of(step.batch), limit
        )
    return 0
