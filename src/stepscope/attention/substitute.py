"""Attention that somebody's model writes out, done as one kernel without a change to the model.

    with written_out_as_one_kernel():
        loss = model(batch)

Within it a product of two batches of matrices is put off. Scaling, masks, softmax and dropout are
noted, and when the weights meet the values, `scaled_dot_product_attention` does all of it. Whatever
else is asked of a product that was put off makes it at once, as it was written.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_MASKED_BELOW = -1e4
"""A score filled with less than this counts for nothing after a softmax."""
_MASKS_LOOKED_AT = 64
"""Of each shape; later ones are taken for what those were, since to look means to wait."""

Function = Callable[..., Any]

_TENSOR = torch.Tensor
PRODUCTS: set[Any] = {
    operator.matmul, torch.matmul, torch.bmm, _TENSOR.matmul, _TENSOR.bmm, _TENSOR.__matmul__,
}  # fmt: skip
_TIMES: set[Any] = {operator.mul, torch.mul, _TENSOR.mul, _TENSOR.mul_}
_OVER: set[Any] = {operator.truediv, torch.div, torch.true_divide, _TENSOR.div, _TENSOR.div_}
_PLUS: set[Any] = {operator.add, torch.add, torch.Tensor.add, torch.Tensor.add_}
_FILLED = {torch.masked_fill, torch.Tensor.masked_fill, torch.Tensor.masked_fill_}
_SOFTMAX = {torch.softmax, torch.Tensor.softmax, functional.softmax}
_DROPOUT = {functional.dropout, torch.dropout}
_CAST = {torch.Tensor.to, torch.Tensor.type_as, torch.Tensor.float}
IN_PLACE = {torch.Tensor.mul_, torch.Tensor.div_, torch.Tensor.add_, torch.Tensor.masked_fill_}


class CausalMasks:
    """Whether masks are causal: a kernel that knows it leaves out half of the work."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], tuple[int, bool]] = {}

    def causal(self, allowed: torch.Tensor) -> bool:
        """`allowed` is true where a query may see a key."""
        rows, columns = allowed.shape[-2:]
        if rows != columns or rows < 2 or allowed.numel() != rows * columns:
            return False
        key = tuple(allowed.shape)
        looks, all_causal = self._seen.get(key, (0, True))
        if isinstance(allowed, FakeTensor):
            # One without values, of the compiler: what its like were shows.
            return looks > 0 and all_causal
        if looks < _MASKS_LOOKED_AT and all_causal:
            lower = torch.ones(rows, columns, dtype=torch.bool, device=allowed.device).tril()
            all_causal = bool(torch.equal(allowed.reshape(rows, columns), lower))
            self._seen[key] = looks + 1, all_causal
        return all_causal


class written_out_as_one_kernel(TorchFunctionMode):  # noqa: N801
    """Counts in `substituted` how many attentions it made."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = CausalMasks()
        self.substituted = 0

    def __torch_function__(
        self,
        function: Function,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        del types
        if function in PRODUCTS and not keywords and _two_batches(arguments):
            return PutOff(arguments[0], arguments[1], self)
        return function(*arguments, **(keywords or {}))


def _two_batches(arguments: tuple[Any, ...]) -> bool:
    if len(arguments) != 2 or not all(isinstance(one, torch.Tensor) for one in arguments):
        return False
    left, right = arguments
    same = left.dim() == right.dim() >= 3
    return bool(same and left.is_floating_point())


class PutOff:
    """Queries times keys, and what was asked of them since."""

    def __init__(
        self, queries: torch.Tensor, keys: torch.Tensor, within: written_out_as_one_kernel
    ) -> None:
        self._queries, self._keys = queries, keys
        self._within = within
        self.scale = 1.0
        self.masked: list[torch.Tensor] = []
        """Where scores were filled with less than any."""
        self.added: list[torch.Tensor] = []
        self._weights = False
        self.dropout = 0.0
        self._asked: list[tuple[Function, tuple[Any, ...], dict[str, Any]]] = []
        self._made: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._queries.shape[:-1], self._keys.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        return self._queries.dtype if self._made is None else self._made.dtype

    @property
    def device(self) -> torch.device:
        return self._queries.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    @property
    def is_put_off(self) -> bool:
        return self._made is None

    @property
    def are_weights(self) -> bool:
        """The softmax is taken."""
        return self._weights

    def as_written(self) -> torch.Tensor:
        """Made now, operator by operator."""
        if self._made is None:
            with torch._C.DisableTorchFunction():
                made = torch.matmul(self._queries, self._keys)
                for function, arguments, keywords in self._asked:
                    made = function(made, *arguments, **keywords)
            self._made = made
        return self._made

    @classmethod
    def __torch_function__(
        cls,
        function: Function,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        del types
        given = keywords or {}
        if arguments and isinstance(arguments[0], PutOff):
            return arguments[0]._ask(function, arguments[1:], given)
        if function in _PLUS | _TIMES and len(arguments) == 2 and isinstance(arguments[1], PutOff):
            return arguments[1]._ask(function, arguments[:1], given)
        if function is torch.where and len(arguments) == 3 and isinstance(arguments[1], PutOff):
            condition, scores, other = arguments
            if isinstance(other, int | float) and isinstance(condition, torch.Tensor):
                return scores._ask(torch.masked_fill, (~condition, other), {})
        return function(*_made_all(arguments), **_made_all(given))

    def _ask(self, function: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if self._made is None:
            if function in PRODUCTS and self._weights and not keywords:
                return self._with_values(arguments[0])
            known = self._noted(function, arguments, keywords)
            if known is not None:
                return known
        made = _made_all(arguments)
        return function(self.as_written(), *made, **keywords)

    def _noted(
        self, function: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> PutOff | None:
        """The same with one more thing to do, or None where that is not of attention."""
        after = self if function in IN_PLACE else self._copy()
        first = arguments[0] if arguments else None
        if self._weights:
            if function in _DROPOUT:
                given = dict(zip(("p", "training"), arguments, strict=False)) | keywords
                if given.get("inplace") or set(given) - {"p", "training", "inplace"}:
                    return None
                after.dropout = float(given.get("p", 0.5)) if given.get("training", True) else 0.0
            elif function not in _CAST:
                return None
        elif function in _SOFTMAX:
            given = dict(zip(("dim",), arguments, strict=False)) | keywords
            if given.get("dim") not in (-1, self.dim() - 1) or len(arguments) > 1:
                return None
            after._weights = True
        elif function in _TIMES | _OVER and isinstance(first, int | float) and not keywords:
            # A mask below any score stays below it; a bias would have to be scaled as well.
            if self.added or first <= 0:
                return None
            after.scale = self.scale * first if function in _TIMES else self.scale / first
        elif function in _PLUS and isinstance(first, torch.Tensor) and not keywords:
            if first.dim() < 2:
                return None
            after.added.append(first)
        elif function in _FILLED and _fills(arguments, keywords):
            after.masked.append(arguments[0])
        else:
            return None
        after._asked.append((function, arguments, keywords))
        return after

    def _copy(self) -> PutOff:
        other = PutOff(self._queries, self._keys, self._within)
        other.scale, other.dropout, other._weights = self.scale, self.dropout, self._weights
        other.masked, other.added = list(self.masked), list(self.added)
        other._asked = list(self._asked)
        return other

    @property
    def is_causal(self) -> bool:
        """The masks together are the causal one, and nothing else was added."""
        causal = self._within.masks.causal
        if len(self.masked) == 1 and not self.added:
            return causal(~self.masked[0])
        # A causal mask that is added has nothing but zeros where it lets through.
        one = self.added[0] if len(self.added) == 1 and not self.masked else None
        return one is not None and not one.requires_grad and causal(one == 0)

    def _with_values(self, values: torch.Tensor) -> torch.Tensor:
        causal = self.is_causal
        mask = None
        for one in () if causal else self.masked:
            mask = ~one if mask is None else mask & ~one
        for bias in () if causal else self.added:
            added = bias.to(self._queries.dtype)
            if mask is not None and mask.dtype == torch.bool:
                mask = added.masked_fill(~mask, float("-inf"))
            else:
                mask = added if mask is None else mask + added
        self._within.substituted += 1
        return functional.scaled_dot_product_attention(
            self._queries, self._keys.transpose(-2, -1), values, attn_mask=mask,
            dropout_p=self.dropout, is_causal=causal, scale=self.scale,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name)
        if callable(method):
            return lambda *arguments, **keywords: self._ask(method, arguments, keywords)
        return getattr(self.as_written(), name)

    def __truediv__(self, other: Any) -> Any:
        return self._ask(operator.truediv, (other,), {})

    def __mul__(self, other: Any) -> Any:
        return self._ask(operator.mul, (other,), {})

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        return self._ask(operator.add, (other,), {})

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self.as_written() - other

    def __neg__(self) -> Any:
        return -self.as_written()

    def __matmul__(self, other: Any) -> Any:
        return self._ask(torch.matmul, (other,), {})

    def __getitem__(self, place: Any) -> Any:
        return self.as_written()[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self.as_written()[place] = value


def _fills(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    if keywords or len(arguments) != 2:
        return False
    mask, value = arguments
    small = isinstance(value, int | float) and value < _MASKED_BELOW
    return small and isinstance(mask, torch.Tensor) and mask.dtype == torch.bool


def _made_all(values: Any) -> Any:
    return tree_map(lambda one: one.as_written() if isinstance(one, PutOff) else one, values)
