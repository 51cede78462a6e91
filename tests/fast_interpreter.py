"""A faster Triton interpreter: the same results without repeated work.

Every call of a device function patches `triton.language` again, although the launch of the kernel
has done so; this takes a third of the time of a kernel with small blocks. The table of NumPy dtypes
is rebuilt at every operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any


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
