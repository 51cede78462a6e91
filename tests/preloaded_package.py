"""Modules of Stepscope that the server of `fork_server` has imported.

Importing them takes a quarter second of CPU time in each of the hundreds of processes of the tests.
A module is put back when it is imported, after the modules that it imports itself, so that
`sys.modules` and the import hooks of a program see what they would see without a server.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PACKAGE = "stepscope"
_ROOTS = (
    "advisor.scope.library",
    "advisor.scope.launch",
    "runner.worker",
    "runner.runner",
    "studies.registry",
    "report.html",
    "acceleration.train_step",
    "advisor.judge.observer",
    "advisor.patch.observer",
    "parallel.rank_process",
    "parallel.fsdp",
    "parallel.ddp",
    "parallel.sharded_optimizer",
    "model.transformer",
    "planning.fit",
)
"""Without `cli.common` and `advisor.observer.observer`, which read a variable when executed."""


class Preloaded(importlib.abc.MetaPathFinder):
    """Finds the modules of Stepscope that the server has imported from a folder."""

    def __init__(self, folder: str) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._needs: dict[str, dict[str, None]] = {}
        """The modules that each one imports when it is executed, in this order."""
        sys.path.insert(0, folder)
        try:
            with self._recorded():
                for root in _ROOTS:
                    importlib.import_module(f"{PACKAGE}.{root}")
        except Exception:
            # The programs report it.
            self._needs.clear()
        finally:
            sys.path.remove(folder)
        self.imported = {name: m for name, m in sys.modules.items() if _is_ours(name)}
        for name in self.imported:
            del sys.modules[name]
        if self._needs:
            self._modules.update(self.imported)

    def forget(self) -> None:
        """Let all of them be executed, which registers their operators again."""
        values = [value for module in self._modules.values() for value in vars(module).values()]
        for library in [value for value in values if type(value).__name__ == "Library"]:
            library._destroy()
        self._modules.clear()

    def execute(self, name: str) -> None:
        """Let the main module be executed."""
        self._modules.pop(name, None)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record the import statements of modules, not those of their functions."""
        execute = builtins.__import__

        def recorded(
            name: str, spaces: Any = None, local: Any = None, wanted: Any = (), level: int = 0
        ) -> ModuleType:
            module = execute(name, spaces, local, wanted, level)
            importer = (spaces or {}).get("__name__", "")
            if _is_ours(importer) and sys._getframe(1).f_code.co_name == "<module>":
                needs = self._needs.setdefault(importer, {})
                needs[name] = None
                submodules = (f"{name}.{one}" for one in wanted or ())
                needs.update(dict.fromkeys(one for one in submodules if one in sys.modules))
            return module

        builtins.__import__ = recorded
        try:
            yield
        finally:
            builtins.__import__ = execute

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = self._modules.get(fullname)
        if module is None or module.__spec__ is None:
            return None
        spec = module.__spec__
        if fullname == PACKAGE:
            found = PathFinder.find_spec(fullname, path, target)
            if found is None or found.origin != spec.origin:
                self.forget()
                return None
        return ModuleSpec(
            fullname,
            _Restorer(self, module),
            origin=spec.origin,
            is_package=spec.submodule_search_locations is not None,
        )

    def taken(self, name: str) -> Iterator[str]:
        """Yield the modules that this one imports. A second import of it executes it."""
        del self._modules[name]
        yield from self._needs.get(name, ())


class _Restorer(importlib.abc.Loader):
    """Puts a module back instead of executing it."""

    def __init__(self, preloaded: Preloaded, module: ModuleType) -> None:
        self._preloaded = preloaded
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        for name in self._preloaded.taken(module.__name__):
            importlib.import_module(name)


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == PACKAGE
