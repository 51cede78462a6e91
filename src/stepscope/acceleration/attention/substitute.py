"""Replaces naive attention in a user's model by a fused kernel, without changing the model.

    with fused_attention():
        loss = model(batch)

Within the context, a batched matmul is deferred. Scaling, masks, softmax and dropout are recorded,
and when the probabilities are multiplied by the values, `scaled_dot_product_attention` computes all
of it. The matmuls may be einsums, and the softmax torch's or a softmax computed from elementary
operations (exp, sum, division). Any other use of a deferred matmul computes it immediately as the
program wrote it: with the autograd and autocast state of the original call, and before anything
overwrites its operands.

A deferred matmul is not an instance of `torch.Tensor`, which torch's C++ code would read as one. A
custom autograd Function could not propagate gradients through it, so passing it to one is an error.
"""

from __future__ import annotations

import math
import operator
import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from stepscope.acceleration.attention.context import (
    AutogradState,
    can_be_mapped,
    share_memory,
    within_an_autograd_function,
    writes,
)
from stepscope.acceleration.attention.deferred import (
    Deferred,
    Function,
    RowReduction,
    materialized,
)
from stepscope.acceleration.attention.einsum import as_matmul
from stepscope.acceleration.attention.kernel_call import fused
from stepscope.acceleration.attention.masks import (
    MASKED_BELOW,
    CausalMasks,
    Filled,
    kernel_mask,
    masks_like_naive,
)
from stepscope.attention.inputs import matmul_dtype

_TENSOR = torch.Tensor
MATMULS: set[Any] = {
    operator.matmul,
    torch.matmul,
    torch.bmm,
    _TENSOR.matmul,
    _TENSOR.bmm,
    _TENSOR.__matmul__,
}
IN_PLACE: set[Any] = {
    _TENSOR.mul_,
    _TENSOR.div_,
    _TENSOR.add_,
    _TENSOR.masked_fill_,
    _TENSOR.__imul__,
    _TENSOR.__itruediv__,
    _TENSOR.__iadd__,
    operator.imul,
    operator.itruediv,
    operator.iadd,
}
_TIMES: set[Any] = {
    operator.mul,
    operator.imul,
    torch.mul,
    _TENSOR.mul,
    _TENSOR.mul_,
    _TENSOR.__mul__,
    _TENSOR.__rmul__,
    _TENSOR.__imul__,
}
_OVER: set[Any] = {
    operator.truediv,
    operator.itruediv,
    torch.div,
    torch.true_divide,
    _TENSOR.div,
    _TENSOR.div_,
    _TENSOR.__truediv__,
    _TENSOR.__itruediv__,
}
_PLUS: set[Any] = {
    operator.add,
    operator.iadd,
    torch.add,
    _TENSOR.add,
    _TENSOR.add_,
    _TENSOR.__add__,
    _TENSOR.__radd__,
    _TENSOR.__iadd__,
}
_MINUS: set[Any] = {operator.sub, torch.sub, _TENSOR.sub, _TENSOR.__sub__}
_EXP: set[Any] = {torch.exp, _TENSOR.exp}
_COMMUTATIVE = (_TIMES | _PLUS) - IN_PLACE
_FILLED = {torch.masked_fill, torch.Tensor.masked_fill, torch.Tensor.masked_fill_}
_SOFTMAX = {torch.softmax, torch.Tensor.softmax, functional.softmax}
_DROPOUT = {functional.dropout, torch.dropout}
_CAST = {torch.Tensor.to, torch.Tensor.type_as, torch.Tensor.float}


class fused_attention(TorchFunctionMode):  # noqa: N801
    """Mode that replaces naive attention by a fused kernel; `substituted` counts replacements."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = CausalMasks()
        self.substituted = 0
        self._registered: list[weakref.ref[DeferredMatmul]] = []

    def __torch_function__(
        self,
        function: Function,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = keywords or {}
        if self._registered and writes(function, kwargs):
            self._compute_readers_of(tree_leaves((arguments[:1], kwargs)))
        if function is torch.einsum or function in MATMULS:
            operands, order = arguments, None
            if function is torch.einsum:
                operands, order = as_matmul(arguments) or ((), None)
            if not kwargs and order is None and can_be_deferred(operands):
                return DeferredMatmul(operands[0], operands[1], self)
        return function(*arguments, **kwargs)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None:
            for one in self._deferred():
                one.materialize()

    def register(self, one: DeferredMatmul) -> None:
        self._registered = [other for other in self._registered if other() is not None]
        self._registered.append(weakref.ref(one))

    def _deferred(self) -> list[DeferredMatmul]:
        alive = [reference() for reference in self._registered]
        return [one for one in alive if one is not None and one.is_deferred]

    def _compute_readers_of(self, written: list[Any]) -> None:
        for one in self._deferred():
            if share_memory(one.read, written):
                one.materialize()


def can_be_deferred(operands: tuple[Any, ...]) -> bool:
    """Return whether these are two batches of matrices of equal batch shape, so that all properties
    of their matmul except its values are known."""
    if len(operands) != 2 or not all(isinstance(one, torch.Tensor) for one in operands):
        return False
    left, right = operands
    return bool(
        left.dim() == right.dim() >= 3
        and left.shape[:-2] == right.shape[:-2]
        and left.shape[-1] == right.shape[-2]
        and left.is_floating_point()
        and left.device == right.device
        and (left.dtype == right.dtype or matmul_dtype(left) == matmul_dtype(right))
        and left.layout == right.layout == torch.strided
        # Inference tensors have no version counter.
        and not (left.is_inference() or right.is_inference())
        and can_be_mapped()
    )


class DeferredMatmul(Deferred):
    """A deferred matmul of queries and keys, and the operations recorded on it since."""

    def __init__(self, queries: torch.Tensor, keys: torch.Tensor, within: fused_attention) -> None:
        self._queries, self._keys = queries, keys
        self._within = within
        self.state = AutogradState.now(queries)
        self._versions = [(one, one._version) for one in (queries, keys)]
        self.scale = 1.0
        self.masked: list[Filled] = []
        """Masks of scores that were filled with large negative values, and these values."""
        self.added: list[torch.Tensor] = []
        self._has_softmax = False
        self._is_shifted = self._is_exponential = False
        """Steps of a softmax computed from elementary operations (exp, sum, division): the scores
        minus the maximum of their row, and exp of that."""
        self.dropout = 0.0
        self._operations: list[tuple[Function, tuple[Any, ...], dict[str, Any]]] = []
        self._value: torch.Tensor | None = None
        within.register(self)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._queries.shape[:-1], self._keys.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        if self._value is not None:
            return self._value.dtype
        with torch._C.DisableTorchFunction(), self.state.restored(self._queries):
            one = self._queries.new_empty((0,) * self.dim(), dtype=matmul_dtype(self._queries))
            for function, arguments, keywords in self._operations:
                if function in _SOFTMAX | _CAST | _EXP:
                    one = function(one, *arguments, **keywords)
                elif function in _PLUS - IN_PLACE:
                    one = one.to(torch.promote_types(one.dtype, arguments[0].dtype))
        return one.dtype

    @property
    def device(self) -> torch.device:
        return self._queries.device if self._value is None else self._value.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    @property
    def is_deferred(self) -> bool:
        return self._value is None

    @property
    def read(self) -> list[torch.Tensor]:
        """Tensors that it reads."""
        return [one for one, _ in self._versions]

    def materialize(self) -> torch.Tensor:
        """Compute it now, operator by operator, with the autograd and autocast state of its
        creation."""
        if self._value is None:
            self._check_gradients()
            self._check_versions()
            with torch._C.DisableTorchFunction(), self.state.restored(self._queries):
                value = torch.matmul(self._queries, self._keys)
                for function, arguments, keywords in self._operations:
                    value = function(value, *materialized(arguments), **keywords)
            self._value = value
        return self._value

    def _check_versions(self) -> None:
        if any(one._version != version for one, version in self._versions):
            raise RuntimeError(
                "an operand of a deferred matmul was modified in place, by a write that torch"
                " function modes do not see"
            )

    def _check_gradients(self) -> None:
        learns = self.state.gradients and any(one.requires_grad for one in self.read)
        if learns and not torch.is_grad_enabled() and within_an_autograd_function():
            raise RuntimeError("a deferred matmul was passed to a custom autograd Function")

    @classmethod
    def __torch_function__(
        cls,
        function: Function,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = keywords or {}
        if function is torch.einsum and (found := as_matmul(arguments)) is not None:
            (left, right), order = found
            if isinstance(left, DeferredMatmul):
                out = left._apply(torch.matmul, (right,), kwargs)
                return out if order is None else out.permute(order)
        if arguments and isinstance(arguments[0], DeferredMatmul):
            return arguments[0]._apply(function, arguments[1:], kwargs)
        second = arguments[1] if len(arguments) > 1 else None
        result = None
        if isinstance(second, DeferredMatmul):
            if function in _COMMUTATIVE and len(arguments) == 2:
                result = second._deferred_with(function, arguments[:1], kwargs)
            elif function is torch.where and len(arguments) == 3:
                condition, _, other = arguments
                if isinstance(condition, torch.Tensor) and condition.dtype == torch.bool:
                    result = second._deferred_with(torch.masked_fill, (~condition, other), kwargs)
        return (
            function(*materialized(arguments), **materialized(kwargs)) if result is None else result
        )

    def _apply(
        self, function: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        deferred = self._deferred_with(
            function, materialized(arguments, rows=False), materialized(keywords, rows=False)
        )
        if deferred is not None:
            return deferred
        arguments, keywords = materialized(arguments), materialized(keywords)
        # A matmul of scores or probabilities is not deferred again.
        plain = torch._C.DisableTorchFunction() if function in MATMULS else nullcontext()
        with plain:
            return function(self.materialize(), *arguments, **keywords)

    def _deferred_with(
        self, function: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Return the attention, or a deferred matmul with one more recorded operation; None if the
        operation is not part of attention."""
        if self._value is not None:
            return None
        # Without this the mode would intercept every access to a tensor attribute below.
        with torch._C.DisableTorchFunction():
            if AutogradState.now(self._queries) != self.state:
                return None
            if function in MATMULS:
                takes = len(arguments) == 1 and not keywords and self.takes(arguments[0])
                return self._with_values(arguments[0]) if takes else None
            if not self._has_softmax and self._is_exponential == (function in RowReduction.SUM):
                # Of a copy: the scores may be written in place later.
                reduced = RowReduction.over_rows(self._copy(), function, arguments, keywords)
                if reduced is not None:
                    return reduced
            return self._recorded(function, arguments, keywords)

    def _recorded(
        self, function: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> DeferredMatmul | None:
        after = self if function in IN_PLACE else self._copy()
        first: Any = arguments[0] if arguments else None
        if self._has_softmax:
            if function in _DROPOUT:
                given = dict(zip(("p", "training"), arguments, strict=False)) | keywords
                unknown = set(given) - {"p", "training", "inplace"}
                if given.get("inplace") or unknown or self.dropout:
                    return None
                after.dropout = float(given.get("p", 0.5)) if given.get("training", True) else 0.0
            elif function not in _CAST:
                return None
        elif self._is_shifted:
            if self._is_exponential and function in _OVER - IN_PLACE and self._is_sum(first):
                after._has_softmax = True
            elif not self._is_exponential and function in _EXP:
                after._is_exponential = True
            else:
                return None
        elif function in _MINUS and self._is_maximum(first) and len(arguments) == 1:
            after._is_shifted = True
        elif function in _SOFTMAX:
            given = dict(zip(("dim",), arguments, strict=False)) | keywords
            if given.get("dim") not in (-1, self.dim() - 1) or len(arguments) > 1:
                return None
            after._has_softmax = True
        elif function in _TIMES | _OVER and isinstance(first, int | float) and not keywords:
            # Fill values other than -inf and biases would have to be scaled as well.
            finite = any(value != -math.inf for _, value in self.masked)
            if self.added or finite or not 0 < first < math.inf:
                return None
            after.scale = self.scale * first if function in _TIMES else self.scale / first
        elif function in _PLUS and self._covered_by(first) and not keywords:
            after._read(first)
            after.added.append(first)
        elif function in _FILLED and self._fills(arguments) and not keywords:
            after._read(first)
            after.masked.append((first, float(arguments[1])))
        else:
            return None
        after._operations.append((function, arguments, keywords))
        return after

    def _is_maximum(self, rows: Any) -> bool:
        """Return whether these are the largest values of this one's rows."""
        return isinstance(rows, RowReduction) and rows.is_max and self._equals(rows.of)

    def _is_sum(self, rows: Any) -> bool:
        return isinstance(rows, RowReduction) and rows.is_sum and self._equals(rows.of)

    def _equals(self, other: DeferredMatmul) -> bool:
        """Return whether another one has the same operands and operations."""
        same = self._queries is other._queries and self._keys is other._keys
        return same and [*map(id, self._operations)] == [*map(id, other._operations)]

    def _fills(self, arguments: tuple[Any, ...]) -> bool:
        if len(arguments) != 2:
            return False
        mask, value = arguments
        small = isinstance(value, int | float) and value < MASKED_BELOW
        return small and self._covered_by(mask) and mask.dtype == torch.bool

    def _covered_by(self, one: Any) -> bool:
        """Return whether a mask or bias broadcasts to the scores in a way the kernel supports."""
        if not isinstance(one, torch.Tensor) or one.is_inference() or one.device != self.device:
            return False
        sizes = zip(reversed(one.shape), reversed(self.shape), strict=False)
        return 2 <= one.dim() <= self.dim() and all(size in (1, full) for size, full in sizes)

    def _read(self, one: Any) -> None:
        self._versions.append((one, one._version))

    def _copy(self) -> DeferredMatmul:
        other = object.__new__(DeferredMatmul)
        other.__dict__.update(self.__dict__)
        other._versions, other._operations = self._versions[:], self._operations[:]
        other.masked, other.added = self.masked[:], self.added[:]
        self._within.register(other)
        return other

    @property
    def is_causal(self) -> bool:
        """True if the masks together are exactly one causal mask, without a bias."""
        return self._within.masks.causal_together(self.masked, self.added)

    def takes(self, values: Any) -> bool:
        """Return whether the fused kernel gives the same result as these probabilities times the
        values."""
        if not self._has_softmax or not can_be_deferred((self._keys, values)):
            return False
        return masks_like_naive(self.masked, matmul_dtype(self._queries)) or self.is_causal

    def _with_values(self, values: torch.Tensor) -> torch.Tensor:
        self._check_versions()
        causal = self.is_causal
        mask = None
        if not causal and (self.masked or self.added):
            mask = kernel_mask(self.masked, self.added, self._queries)
        self._within.substituted += 1
        return fused(
            self._queries,
            self._keys.transpose(-2, -1),
            values,
            attn_mask=mask,
            dropout_p=self.dropout,
            is_causal=causal,
            scale=self.scale,
        )
