"""Parts of a batch along its first dimension."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.errors import UsageError


def batch_size(batch: Any) -> int:
    """Return the length of the first dimension of all tensors; 1 if they differ."""
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in tree_leaves(batch) if _is_tensor(leaf)}
    return sizes.pop() if len(sizes) == 1 else 1


def micro_batches(batch: Any, number: int) -> list[Any]:
    """Split a batch into equal parts."""
    if number == 1:
        return [batch]
    size = batch_size(batch)
    if size % number:
        raise UsageError(
            f"the memory was planned for {number} micro-batches, and this batch has {size} rows",
            "use batches of one size, such as drop_last=True in the loader",
        )
    rows = size // number
    return [tree_map(partial(_rows, at, rows), batch) for at in range(0, size, rows)]


def _rows(first: int, number: int, leaf: Any) -> Any:
    return leaf[first : first + number] if _is_tensor(leaf) else leaf


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)
