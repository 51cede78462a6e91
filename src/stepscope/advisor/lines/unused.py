"""Rows of matmul results that no operator of the forward pass reads, such as logits of positions
that no loss is computed for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from stepscope.advisor.lines.operators import Operator, storage_of

_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "linear"}
_SELECTS = {"index", "index_select", "masked_select", "gather", "clone", "contiguous"}
"""Operators whose result is a part of their input, or a copy: what reads it reads the input."""


class _Result:
    """Result of a matmul, and how much of it was read, counted with repetitions."""

    def __init__(self, site: int, tensor: torch.Tensor) -> None:
        self.site = site
        self.elements, self.rows = tensor.numel(), _rows(tensor)
        self._elements_read = self._rows_read = 0

    def read(self, tensor: torch.Tensor) -> None:
        self._elements_read += tensor.numel()
        self._rows_read += _rows(tensor)

    @property
    def unused(self) -> int:
        """Elements in rows that nothing has read. A result that nothing reads at all is read by
        what is not observed."""
        if not self._elements_read:
            return 0
        shares = self._elements_read / self.elements, self._rows_read / max(1, self.rows)
        return round(self.elements * max(0.0, 1 - max(shares)))


class Results:
    """Matmul results of a step."""

    def __init__(self) -> None:
        self._all: list[_Result] = []
        self._of: dict[int, _Result] = {}

    def clear(self) -> None:
        self._all.clear()
        self._of.clear()

    def note(
        self,
        operator: Operator,
        site: int,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Note an operator of the forward pass, or with a site of -1 one of the backward."""
        known = {storage_of(tensor) for tensor in inputs}
        is_view = not operator.mutates and any(storage_of(one) in known for one in outputs)
        if operator.view or is_view:
            return
        passed_on = None
        for tensor in inputs if site >= 0 else ():
            result = self._of.get(storage_of(tensor))
            selects = operator.base in _SELECTS and tensor is inputs[0]
            if result is not None and passed_on is None and (selects or operator.pointwise):
                passed_on = result
            elif result is not None:
                result.read(tensor)
        for tensor in outputs:
            key = storage_of(tensor)
            if operator.base in _MATMULS and site >= 0 and tensor.numel():
                self._of[key] = _Result(site, tensor)
                self._all.append(self._of[key])
            elif passed_on is not None:
                self._of[key] = passed_on
            elif not operator.mutates:
                # Memory that is used again.
                self._of.pop(key, None)

    def computed(self) -> Counter[int]:
        """Elements of the results, by site."""
        return self._summed(lambda one: one.elements)

    def unused(self) -> Counter[int]:
        """Those of them in rows that nothing has read."""
        return self._summed(lambda one: one.unused)

    def _summed(self, count: Callable[[_Result], int]) -> Counter[int]:
        counts: Counter[int] = Counter()
        for one in self._all:
            counts[one.site] += count(one)
        return counts


def _rows(tensor: torch.Tensor) -> int:
    return tensor.numel() // max(1, tensor.shape[-1]) if tensor.dim() else 1
