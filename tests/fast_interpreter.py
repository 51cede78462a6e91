"""A faster Triton interpreter: the same results without repeated work.

Every call of a device function patches `triton.language` again, although the launch of the kernel
has done so; this takes a third of the time of a kernel with small blocks. The table of NumPy dtypes
is rebuilt at every operation. Every result has a type with a shape and every tensor has a shape of
its own, checked and wrapped again, although a kernel has only a few shapes: another third.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple


def install() -> None:
    """Patch the interpreter of this process; no effect if it lacks these functions."""
    try:
        from triton.language import core
        from triton.runtime import interpreter
    except ImportError:
        return
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _once(interpreter, core)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _cached_dtypes(interpreter._get_np_dtype, core)
    if all(hasattr(core, name) for name in ("block_type", "tensor", "tuple", "constexpr")):
        _share_shapes(core)


def _once(interpreter: ModuleType, core: ModuleType) -> Callable[[Any], Any]:
    """Return a `_patch_lang` that does nothing if the modules a function uses are patched."""
    patch = interpreter._patch_lang
    languages = (interpreter.tl, core)

    @functools.cache
    def seen_by(fn: Any) -> tuple[ModuleType, ...]:
        values = fn.__globals__.values()
        return tuple(one for one in languages if any(value is one for value in values))

    def replaced(language: Any) -> bool:
        return not (core.is_builtin(language.load) or core.is_builtin(language.tensor.__add__))

    def patch_once(fn: Any) -> Any:
        seen = seen_by(fn)
        if seen and all(map(replaced, seen)):
            return interpreter._LangPatchScope()
        return patch(fn)

    return patch_once


def _cached_dtypes(find: Callable[[Any], Any], core: ModuleType) -> Callable[[Any], Any]:
    """Return a `_get_np_dtype` with a cache by element type: block types are not hashable."""
    cached = functools.cache(find)

    def np_dtype(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        return find(element) if isinstance(element, core.pointer_type) else cached(element)

    return np_dtype


class _Shape(NamedTuple):
    """What the constructors of types and tensors derive from the sizes of a block."""

    of_type: Any
    numel: int
    text: str
    of_tensor: Any
    constexpr_numel: Any


def _share_shapes(core: ModuleType) -> None:
    """Give all types and tensors of the same sizes the same shape, which nothing modifies."""
    block_type, tensor, constexpr = core.block_type, core.tensor, core.constexpr
    new_type, new_tensor, equal = block_type.__init__, tensor.__init__, core.tuple.__eq__

    @functools.cache
    def shape_of(sizes: tuple[int, ...]) -> _Shape:
        example = block_type.__new__(block_type)
        new_type(example, core.float32, list(sizes))
        value = tensor.__new__(tensor)
        new_tensor(value, None, example)
        return _Shape(example.shape, example.numel, str(example.shape), value.shape, value.numel)

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(one.value if type(one) is constexpr else one for one in shape)
        if not all(type(one) is int for one in sizes):
            return new_type(self, element_ty, shape)
        known = shape_of(sizes)
        self.element_ty, self.shape, self.numel = element_ty, known.of_type, known.numel
        self.name = f"<{known.text}, {element_ty}>"
        self.known_shape = known
        return None

    scalar = tensor.__new__(tensor)
    new_tensor(scalar, None, core.float32)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.shape, self.numel = scalar.shape, scalar.numel
        elif hasattr(type, "known_shape"):
            self.shape, self.numel = type.known_shape.of_tensor, type.known_shape.constexpr_numel
        else:
            new_tensor(self, handle, type)

    def equal_shapes(self: Any, other: Any) -> Any:
        return constexpr(True) if other is self else equal(self, other)

    block_type.__init__, tensor.__init__ = init_type, init_tensor
    core.tuple.__eq__ = equal_shapes
