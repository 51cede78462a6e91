"""Attention that somebody's model writes out, done as one kernel without a change to the model.

    with written_out_as_one_kernel():
        loss = model(batch)

Within it a product of two batches of matrices is put off. Scaling, masks, softmax and dropout are
noted, and when the weights meet the values, `scaled_dot_product_attention` does all of it. Whatever
else is asked of a product that was put off makes it at once, as it was written: with the gradients
and the autocast of the moment it was asked for, before somebody writes over what it reads.

It is no `torch.Tensor` to `isinstance`, which torch's C++ would then read as one. An autograd
Function that somebody wrote could not lead gradients back through it, so that is an error.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.acceleration.attention.context import (
    AutogradState,
    share_memory,
    within_an_autograd_function,
    writes,
)
from stepscope.acceleration.attention.masks import (
    MASKED_BELOW,
    CausalMasks,
    Filled,
    drown_all,
    kernel_mask,
)
from stepscope.attention.inputs import matmul_dtype

Function = Callable[..., Any]

_TENSOR = torch.Tensor
PRODUCTS: set[Any] = {
    operator.matmul, torch.matmul, torch.bmm, _TENSOR.matmul, _TENSOR.bmm, _TENSOR.__matmul__,
}  # fmt: skip
IN_PLACE: set[Any] = {
    _TENSOR.mul_, _TENSOR.div_, _TENSOR.add_, _TENSOR.masked_fill_,
    _TENSOR.__imul__, _TENSOR.__itruediv__, _TENSOR.__iadd__,
    operator.imul, operator.itruediv, operator.iadd,
}  # fmt: skip
_TIMES: set[Any] = {
    operator.mul, operator.imul, torch.mul, _TENSOR.mul, _TENSOR.mul_,
    _TENSOR.__mul__, _TENSOR.__rmul__, _TENSOR.__imul__,
}  # fmt: skip
_OVER: set[Any] = {
    operator.truediv, operator.itruediv, torch.div, torch.true_divide, _TENSOR.div, _TENSOR.div_,
    _TENSOR.__truediv__, _TENSOR.__itruediv__,
}  # fmt: skip
_PLUS: set[Any] = {
    operator.add, operator.iadd, torch.add, _TENSOR.add, _TENSOR.add_,
    _TENSOR.__add__, _TENSOR.__radd__, _TENSOR.__iadd__,
}  # fmt: skip
_EITHER_WAY = (_TIMES | _PLUS) - IN_PLACE
_FILLED = {torch.masked_fill, torch.Tensor.masked_fill, torch.Tensor.masked_fill_}
_SOFTMAX = {torch.softmax, torch.Tensor.softmax, functional.softmax}
_DROPOUT = {functional.dropout, torch.dropout}
_CAST = {torch.Tensor.to, torch.Tensor.type_as, torch.Tensor.float}


class fused_attention(TorchFunctionMode):  # noqa: N801
    """Counts in `substituted` how many attentions it made."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = CausalMasks()
        self.substituted = 0
        self._waiting: list[weakref.ref[DeferredMatmul]] = []

    def __torch_function__(
        self,
        function: Function,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        del types
        given = keywords or {}
        if self._waiting and writes(function, given):
            self._make_what_reads(tree_leaves((arguments[:1], given)))
        if function in PRODUCTS and not given and can_wait(arguments):
            return DeferredMatmul(arguments[0], arguments[1], self)
        return function(*arguments, **given)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None:
            for one in self._put_off():
                one.as_written()

    def waits(self, one: DeferredMatmul) -> None:
        self._waiting = [other for other in self._waiting if other() is not None]
        self._waiting.append(weakref.ref(one))

    def _put_off(self) -> list[DeferredMatmul]:
        alive = [reference() for reference in self._waiting]
        return [one for one in alive if one is not None and one.is_put_off]

    def _make_what_reads(self, written: list[Any]) -> None:
        for one in self._put_off():
            if share_memory(one.read, written):
                one.as_written()


def can_wait(operands: tuple[Any, ...]) -> bool:
    """Two batches of matrices, one for one: all about their product is known but its values."""
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
        # Such do not count their changes.
        and not (left.is_inference() or right.is_inference())
        and not torch._C._are_functorch_transforms_active()
    )


class DeferredMatmul:
    """Queries times keys, and what was asked of them since."""

    def __init__(self, queries: torch.Tensor, keys: torch.Tensor, within: fused_attention) -> None:
        self._queries, self._keys = queries, keys
        self._within = within
        self._moment = AutogradState.now(queries)
        self._versions = [(one, one._version) for one in (queries, keys)]
        self.scale = 1.0
        self.masked: list[Filled] = []
        """Where scores were filled with less than any, and with what."""
        self.added: list[torch.Tensor] = []
        self._weights = False
        self.dropout = 0.0
        self._asked: list[tuple[Function, tuple[Any, ...], dict[str, Any]]] = []
        self._made: torch.Tensor | None = None
        within.waits(self)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._queries.shape[:-1], self._keys.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        if self._made is not None:
            return self._made.dtype
        with torch._C.DisableTorchFunction(), self._moment.again(self._queries):
            one = self._queries.new_empty((0,) * self.dim(), dtype=matmul_dtype(self._queries))
            for function, arguments, keywords in self._asked:
                if function in _SOFTMAX | _CAST:
                    one = function(one, *arguments, **keywords)
                elif function in _PLUS - IN_PLACE:
                    one = one.to(torch.promote_types(one.dtype, arguments[0].dtype))
        return one.dtype

    @property
    def device(self) -> torch.device:
        return self._queries.device if self._made is None else self._made.device

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

    @property
    def read(self) -> list[torch.Tensor]:
        """What it is made of."""
        return [one for one, _ in self._versions]

    def as_written(self) -> torch.Tensor:
        """Made now, operator by operator, with the gradients and the autocast of its moment."""
        if self._made is None:
            self._check_gradients()
            self._check_versions()
            with torch._C.DisableTorchFunction(), self._moment.again(self._queries):
                made = torch.matmul(self._queries, self._keys)
                for function, arguments, keywords in self._asked:
                    made = function(made, *arguments, **keywords)
            self._made = made
        return self._made

    def _check_versions(self) -> None:
        if any(one._version != version for one, version in self._versions):
            raise RuntimeError(
                "what a product reads was changed in place, unseen, since it was put off"
            )

    def _check_gradients(self) -> None:
        learns = self._moment.gradients and any(one.requires_grad for one in self.read)
        if learns and not torch.is_grad_enabled() and within_an_autograd_function():
            raise RuntimeError("a product that was put off came to an autograd Function")

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
        if arguments and isinstance(arguments[0], DeferredMatmul):
            return arguments[0]._ask(function, arguments[1:], given)
        second = arguments[1] if len(arguments) > 1 else None
        known = None
        if isinstance(second, DeferredMatmul):
            if function in _EITHER_WAY and len(arguments) == 2:
                known = second._put_off_with(function, arguments[:1], given)
            elif function is torch.where and len(arguments) == 3:
                condition, _, other = arguments
                if isinstance(condition, torch.Tensor) and condition.dtype == torch.bool:
                    known = second._put_off_with(torch.masked_fill, (~condition, other), given)
        return function(*_made_all(arguments), **_made_all(given)) if known is None else known

    def _ask(self, function: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        arguments, keywords = _made_all(arguments), _made_all(keywords)
        known = self._put_off_with(function, arguments, keywords)
        if known is not None:
            return known
        # Scores or weights times something are not put off in turn.
        plain = torch._C.DisableTorchFunction() if function in PRODUCTS else nullcontext()
        with plain:
            return function(self.as_written(), *arguments, **keywords)

    def _put_off_with(
        self, function: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Attention, or the same with one more thing to do; None where that is not of attention."""
        if self._made is not None:
            return None
        # A mode is asked about every attribute of a tensor, and nothing here concerns it.
        with torch._C.DisableTorchFunction():
            if AutogradState.now(self._queries) != self._moment:
                return None
            if function in PRODUCTS:
                takes = len(arguments) == 1 and not keywords and self.takes(arguments[0])
                return self._with_values(arguments[0]) if takes else None
            return self._noted(function, arguments, keywords)

    def _noted(
        self, function: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> DeferredMatmul | None:
        after = self if function in IN_PLACE else self._copy()
        first: Any = arguments[0] if arguments else None
        if self._weights:
            if function in _DROPOUT:
                given = dict(zip(("p", "training"), arguments, strict=False)) | keywords
                unknown = set(given) - {"p", "training", "inplace"}
                if given.get("inplace") or unknown or self.dropout:
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
            # What was filled in or added would have to be scaled as well, but for -inf.
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
        after._asked.append((function, arguments, keywords))
        return after

    def _fills(self, arguments: tuple[Any, ...]) -> bool:
        if len(arguments) != 2:
            return False
        mask, value = arguments
        small = isinstance(value, int | float) and value < MASKED_BELOW
        return small and self._covered_by(mask) and mask.dtype == torch.bool

    def _covered_by(self, one: Any) -> bool:
        """It broadcasts to the scores, as the kernel takes it."""
        if not isinstance(one, torch.Tensor) or one.is_inference() or one.device != self.device:
            return False
        sizes = zip(reversed(one.shape), reversed(self.shape), strict=False)
        return 2 <= one.dim() <= self.dim() and all(size in (1, whole) for size, whole in sizes)

    def _read(self, one: Any) -> None:
        self._versions.append((one, one._version))

    def _copy(self) -> DeferredMatmul:
        other = object.__new__(DeferredMatmul)
        other.__dict__.update(self.__dict__)
        other._versions, other._asked = self._versions[:], self._asked[:]
        other.masked, other.added = self.masked[:], self.added[:]
        self._within.waits(other)
        return other

    @property
    def is_causal(self) -> bool:
        """The masks together are the causal one, and nothing else was added."""
        return self._within.masks.causal_together(self.masked, self.added)

    def takes(self, values: Any) -> bool:
        """One kernel gives what these weights times the values would be."""
        if not self._weights or not can_wait((self._keys, values)):
            return False
        return drown_all(self.masked, matmul_dtype(self._queries)) or self.is_causal

    def _with_values(self, values: torch.Tensor) -> torch.Tensor:
        self._check_versions()
        causal = self.is_causal
        mask = None
        if not causal and (self.masked or self.added):
            mask = kernel_mask(self.masked, self.added, self._queries)
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


_NOT_ASKED = {
    "__class__", "__delattr__", "__dir__", "__getattribute__", "__getstate__", "__hash__",
    "__init__", "__init_subclass__", "__new__", "__setattr__", "__setstate__", "__sizeof__",
    "__subclasshook__", "__torch_dispatch__", "__torch_function__",
}  # fmt: skip
"""What Python asks of an object itself."""


def _special(method: Function) -> Function:
    def ask(self: DeferredMatmul, *arguments: Any, **keywords: Any) -> Any:
        return self._ask(method, arguments, keywords)

    return ask


# Python looks for these in the class, never through __getattr__.
for _name in set(dir(torch.Tensor)) - _NOT_ASKED:
    if _name.startswith("__") and callable(getattr(torch.Tensor, _name)):
        setattr(DeferredMatmul, _name, _special(getattr(torch.Tensor, _name)))


def _made_all(values: Any) -> Any:
    within = values.values() if isinstance(values, dict) else values
    if not any(isinstance(one, DeferredMatmul | tuple | list | dict) for one in within):
        return values
    return tree_map(
        lambda one: one.as_written() if isinstance(one, DeferredMatmul) else one, values
    )
