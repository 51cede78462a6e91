"""Values that are computed when they are used as a tensor. They are not instances of
`torch.Tensor`, which torch's C++ code would read as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils._pytree import tree_map

Function = Callable[..., Any]

_NOT_FORWARDED = {
    "__class__",
    "__delattr__",
    "__dir__",
    "__getattribute__",
    "__getstate__",
    "__hash__",
    "__init__",
    "__init_subclass__",
    "__new__",
    "__setattr__",
    "__setstate__",
    "__sizeof__",
    "__subclasshook__",
    "__torch_dispatch__",
    "__torch_function__",
}
"""Special methods that are not forwarded to the tensor."""


class Deferred:
    """A value whose methods and attributes are those of its tensor."""

    def materialize(self) -> torch.Tensor:
        """Compute it now, or return it if that was done before."""
        raise NotImplementedError

    def _apply(
        self, function: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        return function(self.materialize(), *materialized(arguments), **materialized(keywords))

    @classmethod
    def __torch_function__(
        cls,
        function: Function,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        del types
        return function(*materialized(arguments), **materialized(keywords or {}))

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name)
        if callable(method):
            return lambda *arguments, **keywords: self._apply(method, arguments, keywords)
        return getattr(self.materialize(), name)


def _forwarded(method: Function) -> Function:
    def call(self: Deferred, *arguments: Any, **keywords: Any) -> Any:
        return self._apply(method, arguments, keywords)

    return call


# Python looks special methods up in the class, never through __getattr__.
for _name in set(dir(torch.Tensor)) - _NOT_FORWARDED:
    if _name.startswith("__") and callable(getattr(torch.Tensor, _name)):
        setattr(Deferred, _name, _forwarded(getattr(torch.Tensor, _name)))


def materialized(values: Any, *, rows: bool = True) -> Any:
    """Return nested values as tensors; without `rows`, reductions of rows stay."""
    within = values.values() if isinstance(values, dict) else values
    if not any(isinstance(one, Deferred | tuple | list | dict) for one in within):
        return values
    kept: Any = () if rows else RowReduction
    return tree_map(
        lambda one: (
            one.materialize() if isinstance(one, Deferred) and not isinstance(one, kept) else one
        ),
        values,
    )


class RowReduction(Deferred):
    """The largest value or the sum of each row of scores, (…, queries, 1)."""

    MAX: ClassVar = {torch.max, torch.Tensor.max}
    AMAX: ClassVar = {torch.amax, torch.Tensor.amax}
    SUM: ClassVar = {torch.sum, torch.Tensor.sum}

    def __init__(
        self, of: Any, function: Function, given: dict[str, Any], index: int | None = None
    ) -> None:
        self.of, self.is_sum = of, function in self.SUM
        self.is_max = not self.is_sum and index != 1
        self._function, self._given, self._index = function, given, index
        self._value: torch.Tensor | None = None

    @classmethod
    def over_rows(
        cls, of: Any, function: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Return the reduction over the last dimension, which stays, or None if it is another."""
        if function not in cls.MAX | cls.AMAX | cls.SUM or len(arguments) > 2:
            return None
        given = dict(zip(("dim", "keepdim"), arguments, strict=False)) | keywords
        if given.get("dim") not in (-1, of.dim() - 1) or given.get("keepdim") is not True:
            return None
        if len(given) != 2:
            return None
        if function in cls.MAX:
            return Maxima(*(cls(of, function, given, index) for index in range(2)))
        return cls(of, function, given)

    def _apply(
        self, function: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        if function is torch.Tensor.detach and self.is_max:
            # The gradient of a softmax does not depend on it.
            return self
        return super()._apply(function, arguments, keywords)

    def materialize(self) -> torch.Tensor:
        if self._value is None:
            scores = self.of.materialize()
            with torch._C.DisableTorchFunction(), self.of.state.restored(scores):
                value = self._function(scores, **self._given)
            self._value = value if self._index is None else value[self._index]
        assert self._value is not None
        return self._value


class Maxima(NamedTuple):
    """What `torch.max` over a dimension returns."""

    values: RowReduction
    indices: RowReduction
