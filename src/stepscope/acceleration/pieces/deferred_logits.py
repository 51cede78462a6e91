"""Logits that are computed only if something other than the cross-entropy reads them.

A head returns `DeferredLogits` instead of its matmul. Views, slices of rows, casts to float32 and
a transposition of the classes are recorded. `torch.nn.functional.cross_entropy` computes the loss
from the hidden states by the fused kernel. Any other use computes the logits as the head would
have, with the autograd and autocast state of its call; they are then ordinary tensors.

A `DeferredLogits` is not an instance of `torch.Tensor`, which torch's C++ code would read as one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from stepscope.acceleration.attention.context import AutogradState, within_an_autograd_function
from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels.cross_entropy import linear_cross_entropy
from stepscope.kernels.weight_copies import WeightCopies

HEAD_LOSS = "head and loss"
"""Name of the piece in reports and in `exclude`."""
Function = Callable[..., Any]
_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape}
_FLATTEN = {Tensor.flatten, torch.flatten}
_TRANSPOSE = {Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes}
_PERMUTE = {Tensor.permute, torch.permute}
_UNCHANGED = {Tensor.contiguous}
_LOSS_OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


class ReadInAutogradFunctionError(RuntimeError):
    """Deferred logits were passed to a custom autograd Function, which cannot propagate gradients
    to them because they are no tensor."""


class Head:
    """The matmul of one call of a head, shared by all views of its logits."""

    def __init__(
        self,
        linear: Function,
        x: Tensor,
        weight: Tensor,
        copies: WeightCopies | None,
        bias: Tensor | None,
    ) -> None:
        self.x, self.weight, self.copies, self.bias = x, weight, copies, bias
        self.state = AutogradState.now(x)
        self.has_loss = False
        """True if a loss has been computed from the hidden states."""
        self.value: Tensor | None = None
        with torch._C.DisableTorchFunction():
            self.dtype = torch.promote_types(matmul_dtype(x), matmul_dtype(weight))
        self._linear = linear
        self._versions = [(one, one._version) for one in (x, weight, bias) if one is not None]

    def materialize(self) -> Tensor:
        if self.state.gradients and not torch.is_grad_enabled() and within_an_autograd_function():
            raise ReadInAutogradFunctionError("deferred logits in a custom autograd Function")
        if self.value is None:
            self.check_versions()
            with torch._C.DisableTorchFunction(), self.state.restored(self.x):
                self.value = self._linear(self.x)
        return self.value

    def check_versions(self) -> None:
        if any(one._version != version for one, version in self._versions):
            raise RuntimeError(
                "the weight of the head or its input has changed since these logits were deferred:"
                " read the logits before the optimizer's step, or call"
                f" stepscope.accelerate(model, exclude=[{HEAD_LOSS!r}])"
            )


class DeferredLogits:
    """Logits of a head, or a view of them, that have not been computed."""

    def __init__(
        self,
        head: Head,
        x: Tensor,
        dtype: torch.dtype,
        operations: tuple[Function, ...] = (),
        classes_dim: int = -1,
    ) -> None:
        self._head = head
        self._x = x
        """Hidden states of the rows of this view."""
        self._dtype = dtype
        self._operations = operations
        """Functions that make this view of the logits of the head."""
        self._classes_dim = classes_dim
        """-1, or 1 after a transposition."""
        self._value: Tensor | None = None

    @classmethod
    def of(
        cls,
        linear: Function,
        x: Tensor,
        weight: Tensor,
        copies: WeightCopies | None,
        bias: Tensor | None = None,
    ) -> DeferredLogits:
        """Defer `linear(x)`, which is the matmul of x and the transposed weight, plus the bias."""
        head = Head(linear, x, weight, copies, bias)
        return cls(head, x, head.dtype)

    @property
    def shape(self) -> torch.Size:
        rows, classes = list(self._x.shape[:-1]), self._head.weight.shape[0]
        rows.insert(len(rows) if self._classes_dim == -1 else self._classes_dim, classes)
        return torch.Size(rows)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._x.device

    @property
    def ndim(self) -> int:
        return self._x.dim()

    @property
    def has_loss(self) -> bool:
        return self._head.has_loss

    @property
    def requires_grad(self) -> bool:
        return True

    @property
    def is_cuda(self) -> bool:
        return self._x.is_cuda

    def dim(self) -> int:
        return self._x.dim()

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def materialize(self) -> Tensor:
        """Compute these logits as the head would have."""
        if self._value is None:
            value = self._head.materialize()
            with torch._C.DisableTorchFunction(), self._head.state.restored(self._x):
                for operation in self._operations:
                    value = operation(value)
            self._value = value
        return self._value

    def __reduce__(self) -> Any:
        return _same, (self.materialize(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy")

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
        if arguments and isinstance(arguments[0], DeferredLogits):
            return arguments[0]._apply(function, arguments[1:], kwargs)
        if function is functional.cross_entropy and isinstance(kwargs.get("input"), cls):
            rest = {name: value for name, value in kwargs.items() if name != "input"}
            return kwargs["input"]._apply(function, arguments, rest)
        return function(*_materialize_all(arguments), **_materialize_all(kwargs))

    def _apply(
        self, function: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        result: Any = None
        if self._head.value is None and self._value is None:
            with torch._C.DisableTorchFunction():
                if function is functional.cross_entropy:
                    result = self._loss(*arguments, **keywords)
                else:
                    result = self._viewed(function, arguments, keywords)
        if result is not None:
            return result
        arguments, keywords = _materialize_all(arguments), _materialize_all(keywords)
        return function(self.materialize(), *arguments, **keywords)

    def _loss(self, target: Any = None, *arguments: Any, **keywords: Any) -> Tensor | None:
        """Return the fused loss; None if the arguments are not supported."""
        given = dict(zip(_LOSS_OPTIONS, arguments, strict=False)) | keywords
        target = given.pop("target", target)
        ignore_index, reduction = given.pop("ignore_index", -100), given.pop("reduction", "mean")
        smoothing = given.pop("label_smoothing", 0.0)
        # A weight per class and deprecated options.
        others = any(value is not None for value in given.values())
        if others or smoothing != 0.0 or reduction not in ("mean", "sum"):
            return None
        wide = torch.promote_types(self._dtype, torch.float32)
        rows = self._x.shape[:-1]
        if not (
            type(target) is Tensor
            and target.dtype == torch.int64
            and target.shape == rows
            and target.device == self.device
            and self._classes_dim == (-1 if self.dim() == 2 else 1)
            and torch.is_grad_enabled()
        ):
            return None
        # Autocast computes the loss in float32; without it, the loss has the dtype of the logits.
        narrow = AutogradState.now(self._x).autocast is None and self._dtype != wide
        self._head.check_versions()
        self._head.has_loss = True
        with self._head.state.restored(self._x):
            loss = linear_cross_entropy(
                self._x,
                self._head.weight,
                target,
                ignore_index=ignore_index,
                reduction=reduction,
                copies=self._head.copies,
                bias=self._head.bias,
            )
        return loss.to(self._dtype) if narrow else loss

    def _viewed(
        self, function: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> DeferredLogits | None:
        """Return the view; None if the function is not one that can be deferred."""
        dtype, classes_dim, x = self._dtype, self._classes_dim, self._x
        if function in _UNCHANGED and not arguments and not keywords:
            pass
        elif _widens(function, arguments) and not keywords:
            dtype = torch.float32
        elif function in _TRANSPOSE | _PERMUTE and not keywords:
            if self.dim() != 3 or not self._swaps_last_two(function, arguments):
                return None
            classes_dim = 1 if classes_dim == -1 else -1
        elif classes_dim != -1 or keywords:
            return None
        elif function in _VIEWS:
            rows = self._rows_of_view(arguments)
            if rows is None:
                return None
            x = x.reshape(*rows, x.shape[-1])
        elif function in _FLATTEN and arguments in ((0, self.dim() - 2), (0, -2)):
            x = x.flatten(0, -2)
        elif function is Tensor.__getitem__:
            index = self._rows_of_index(arguments[0])
            if index is None:
                return None
            x = x[index]
        else:
            return None
        if dtype != self._dtype and self._dtype == torch.float64:
            return None

        def operation(value: Tensor) -> Any:
            return function(value, *arguments, **keywords)

        operations = (*self._operations, operation)
        return DeferredLogits(self._head, x, dtype, operations, classes_dim)

    def _swaps_last_two(self, function: Function, arguments: tuple[Any, ...]) -> bool:
        dims = arguments[0] if len(arguments) == 1 else arguments
        if not all(isinstance(dim, int) for dim in dims):
            return False
        positive = [dim % 3 for dim in dims]
        return positive == [0, 2, 1] if function in _PERMUTE else sorted(positive) == [1, 2]

    def _rows_of_view(self, arguments: tuple[Any, ...]) -> list[int] | None:
        """Return the sizes of the row dimensions of a view that keeps the classes."""
        sizes = arguments[0] if len(arguments) == 1 else arguments
        if isinstance(sizes, int | torch.dtype) or not all(isinstance(one, int) for one in sizes):
            return None
        classes = self._head.weight.shape[0]
        rows, last = list(sizes[:-1]), sizes[-1]
        if last == -1 and -1 not in rows:
            count = 1
            for size in rows:
                count *= size
            last = classes if count == self._x.shape[:-1].numel() else 0
        return rows if rows and last == classes else None

    def _rows_of_index(self, index: Any) -> tuple[Any, ...] | None:
        """Return an index of slices without its last dimension, which must be complete."""
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(one, slice) or one is Ellipsis for one in parts):
            return None
        if sum(one is Ellipsis for one in parts) > 1 or len(parts) > self.dim() + 1:
            return None
        if Ellipsis in parts:
            at = parts.index(Ellipsis)
            missing = self.dim() - len(parts) + 1
            parts = (*parts[:at], *[slice(None)] * missing, *parts[at + 1 :])
        if len(parts) > self.dim() or (len(parts) == self.dim() and parts[-1] != slice(None)):
            return None
        return parts[: self.dim() - 1]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        method = getattr(Tensor, name)
        if callable(method):
            return lambda *arguments, **keywords: self._apply(method, arguments, keywords)
        return getattr(self.materialize(), name)


def _widens(function: Function, arguments: tuple[Any, ...]) -> bool:
    is_cast = function is Tensor.to and arguments == (torch.float32,)
    return is_cast or (function is Tensor.float and not arguments)


def _same(value: Tensor) -> Tensor:
    return value


def _materialize_all(values: Any) -> Any:
    return tree_map(
        lambda one: one.materialize() if isinstance(one, DeferredLogits) else one, values
    )


_OWN = set(dir(DeferredLogits)) | {"__dlpack__", "__dlpack_device__"}


def _forwarded(method: Function) -> Function:
    def call(self: DeferredLogits, *arguments: Any, **keywords: Any) -> Any:
        return self._apply(method, arguments, keywords)

    return call


_OF_TENSORS = {
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__repr__",
    "__format__",
    "__dir__",
}
"""Special methods that `object` has too, in another form."""
# Python looks special methods up in the class, never through __getattr__.
for _name in (set(dir(Tensor)) - _OWN) | _OF_TENSORS:
    if _name.startswith("__") and callable(getattr(Tensor, _name)):
        setattr(DeferredLogits, _name, _forwarded(getattr(Tensor, _name)))
