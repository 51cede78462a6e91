"""Record the dtypes that every operator reads and writes, at the dispatcher.

Autocast works above the dispatcher: its casts arrive here as separate operators, so the recorded
dtypes are those of the computation, not those in the source code.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from stepscope.measure.dispatch import Observer

_CAST = "_to_copy"

Dtypes = tuple[str, ...]


class DtypeRecorder(Observer):  # type: ignore[no-untyped-call]
    """Counts operators by the floating-point dtypes that they read and write, except views."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[tuple[str, Dtypes, Dtypes]] = Counter()
        self.casts: Counter[tuple[tuple[int, ...], str, str]] = Counter()
        """Count of casts by shape, source dtype and target dtype."""

    def after(
        self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        name = function._schema.name.removeprefix("aten::")
        # Matmuls reshape their result by `_unsafe_view`, which is not declared as a view.
        if function.is_view or name == "_unsafe_view":
            return
        read, written = _floating_dtypes((arguments, keywords)), _floating_dtypes(result)
        if written:
            self.operators[name, read, written] += 1
        if name == _CAST and read and read != written:
            self.casts[tuple(arguments[0].shape), read[0], written[0]] += 1


def _floating_dtypes(tree: Any) -> Dtypes:
    names = {
        str(leaf.dtype).removeprefix("torch.")
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
    }
    return tuple(sorted(names))
