"""State that a deferred matmul depends on besides its operands: autograd, autocast and writes."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.attention.inputs import autocast_dtype

_WRITING_NAMES = {"__setitem__", "__set__"}
_WRITING_OPERATORS: set[Any] = {
    operator.setitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.iand,
    operator.ior,
    operator.ixor,
}


_in_vmap = ContextVar("in_vmap", default=False)


@contextlib.contextmanager
def attention_in_vmap() -> Iterator[None]:
    """Replace attention inside of `vmap`, too: no deferred matmul leaves the mapped function."""
    token = _in_vmap.set(True)
    try:
        yield
    finally:
        _in_vmap.reset(token)


def can_be_mapped() -> bool:
    """Return False inside of transforms of `torch.func` under which no matmul can be deferred."""
    return _in_vmap.get() or not torch._C._are_functorch_transforms_active()


class AutogradState(NamedTuple):
    """Grad mode and autocast dtype."""

    gradients: bool
    autocast: torch.dtype | None

    @classmethod
    def now(cls, x: Tensor) -> AutogradState:
        return cls(torch.is_grad_enabled(), autocast_dtype(x))

    @contextlib.contextmanager
    def restored(self, x: Tensor) -> Iterator[None]:
        cast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if autocast_dtype(x) != self.autocast:
            on = self.autocast is not None
            cast = torch.autocast(x.device.type, self.autocast, enabled=on)
        with torch.set_grad_enabled(self.gradients), cast:
            yield


def writes(function: Any, keywords: dict[str, Any]) -> bool:
    """Return whether a function writes to a tensor: its first argument, or `out`."""
    return "out" in keywords or bool(keywords.get("inplace")) or _writes_always(function)


@functools.lru_cache(1024)
def _writes_always(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    ends = name.endswith("_") and not name.endswith("__")
    return ends or name in _WRITING_NAMES or function in _WRITING_OPERATORS


def share_memory(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return not _storages(some).isdisjoint(_storages(others))


def _storages(values: Iterable[Any]) -> set[int]:
    return {
        one.untyped_storage()._cdata
        for one in values
        if isinstance(one, Tensor) and one.layout == torch.strided
    }


def within_an_autograd_function() -> bool:
    """Return whether the forward of a custom autograd Function is running, in which gradients are
    disabled."""
    apply: Any = torch.autograd.Function.apply
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not apply.__func__.__code__:
        frame = frame.f_back
    return frame is not None
