"""Values of small tensors in a run on fake tensors.

Programs decide by values: whether a mask has padding, which position is the last. Those values come
from the batch and from constants, not from the weights, so they are computed next to the fake
tensors. A value that is read and not known is taken as zero, and its line of code is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from stepscope.errors import UsageError
from stepscope.measure.dispatch import OperatorMode

_MAX_EXACT = 1 << 20
"""Elements of the largest integer or boolean tensor whose values are computed."""
_MAX_FLOATS = 1 << 12
_READ = torch.ops.aten._local_scalar_dense.default
_UNKNOWN: Any = object()
_SIZE_FROM_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


class KnownValues(OperatorMode):  # type: ignore[no-untyped-call]
    """Computes what is computed from known values only; active on top of a `FakeTensorMode`."""

    def __init__(self, fakes: FakeTensorMode, line_of_code: Callable[[], str]) -> None:
        super().__init__()
        self.assumed: list[str] = []
        """Lines of code that read an unknown value."""
        self._fakes = fakes
        self._line_of_code = line_of_code
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def know(self, fake: Tensor, value: Tensor) -> None:
        """Add the value of a tensor, if it is small; operators in place write to it."""
        if _is_small(fake):
            self._values[fake] = value

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if any(isinstance(x, FunctionalTensor) for x in _tensors((arguments, keywords))):
            # A compiler traces; values are no part of its graphs.
            return function(*arguments, **keywords)
        if function is _READ:
            return self._read(arguments[0])
        try:
            result = function(*arguments, **keywords)
        except _SIZE_FROM_VALUES as error:
            return self._of_unknown_size(function, arguments, keywords, error)
        self._follow(function, arguments, keywords, result)
        return result

    def _read(self, tensor: Tensor) -> Any:
        known = _UNKNOWN
        if tensor in self._values:
            known = self._values[tensor]
        else:
            line = self._line_of_code()
            if line not in self.assumed:
                self.assumed.append(line)
        with _disable_current_modes():
            value = torch.zeros((), dtype=tensor.dtype) if known is _UNKNOWN else known
            return value.item()

    def _of_unknown_size(
        self, function: Any, arguments: Any, keywords: Any, error: Exception
    ) -> Any:
        """The fake result of an operator whose sizes depend on values, such as `nonzero`."""
        value = self._computed(function, arguments, keywords)
        if value is _UNKNOWN:
            raise UsageError(
                f"the sizes of tensors depend on computed values at {self._line_of_code()}"
                f" ({function})",
                "predict a model whose sizes follow from its inputs",
            ) from error

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            made = self._fakes.from_tensor(leaf)
            self.know(made, leaf)
            return made

        return tree_map(fake, value)

    def _follow(self, function: Any, arguments: Any, keywords: Any, result: Any) -> None:
        made = _tensors(result)
        written = _tensors(_written(function, arguments, keywords))
        value = _UNKNOWN
        if (made or written) and all(map(_is_small, made)):
            value = self._computed(function, arguments, keywords)
        if value is _UNKNOWN:
            for tensor in (*made, *written):
                if tensor in self._values:
                    del self._values[tensor]
            return
        for tensor, known in zip(made, _tensors(value), strict=True):
            self._values[tensor] = known

    def _computed(self, function: Any, arguments: Any, keywords: Any) -> Any:
        """What the operator returns for the known values, if it has no other inputs."""
        fakes = (x for x in _tensors((arguments, keywords)) if isinstance(x, FakeTensor))
        if any(fake not in self._values for fake in fakes):
            return _UNKNOWN
        known = self._values
        with _disable_current_modes():
            arguments, keywords = tree_map(
                lambda leaf: known[leaf] if isinstance(leaf, FakeTensor) else leaf,
                (arguments, keywords),
            )
            return function(*arguments, **keywords)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written(function: Any, arguments: Any, keywords: Any) -> list[Any]:
    """The arguments that an operator writes to."""
    declared = function._schema.arguments
    given = keywords | {a.name: x for a, x in zip(declared, arguments, strict=False)}
    return [given.get(a.name) for a in declared if a.alias_info and a.alias_info.is_write]


def _is_small(tensor: Tensor) -> bool:
    inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.numel() <= (_MAX_FLOATS if inexact else _MAX_EXACT)
