"""Call a function as soon as a module has been imported, without importing it.

A program may set environment variables for threads, devices and caches before it imports torch, so
its observer must not import torch earlier.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` once the module is imported; immediately if it already is."""
    if name in sys.modules:
        then()
        return
    sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook that stays installed until the module is loaded: a search for its spec does not
    imply that it is."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != self._name or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            self._call_after(spec.loader)
        return spec

    def _call_after(self, loader: importlib.abc.Loader) -> None:
        execute = loader.exec_module

        def execute_then_call(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        loader.exec_module = execute_then_call  # type: ignore[method-assign]
