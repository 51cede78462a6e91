"""Pickles functions, arguments and results that travel between a launcher and its ranks.

Pickle sends a function or class as a name that the other process imports. That fails for what has
no name there: a lambda, a local function, and everything that was defined in a notebook, on
standard input, with `python -c` or by `exec`. Those are sent by value: the code, the closure, and
the globals that the code uses. Both processes run the same interpreter, so code objects fit.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import enum
import functools
import importlib
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakValueDictionary

from stepscope.errors import UsageError

_OF_THE_CLASS_ITSELF = {"__dict__", "__weakref__", "_abc_impl"}
_HEAP_TYPE = 1 << 9
"""The flag of a class that Python code has made; those of C modules are not sent by value."""
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)


_SENT: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Functions and classes that this process has sent by value, by their identity."""
_ORIGINS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Those that this process was sent, with their identity where they come from: a result that
refers to one is then the launcher's own."""
Main = Literal["script", "all", "none"]
"""What the other process has of `__main__` under the same names: what the script's file defines
(and not what `exec` added to it), all of it, nothing."""


def dumps(value: Any, main: Main) -> bytes:
    file = io.BytesIO()
    _Pickler(file, main).dump(value)
    return file.getvalue()


loads = pickle.loads
"""Of data that a live process of this job has sent, never of a file."""


def why_not(value: Any, main: Main, seen: frozenset[int] = frozenset()) -> str | None:
    """Which part of a value cannot be sent, and why; None if all of it can."""
    try:
        dumps(value, main)
    except Exception as error:
        for name, part in _parts(value):
            if id(part) not in seen:
                inner = why_not(part, main, seen | {id(value)})
                if inner is not None:
                    return f"{name}: {inner}"
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"a {type(value).__name__} ({text})"
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value consists of, by names that its author knows."""
    if isinstance(value, functools.partial):
        yield "its function", value.func
        yield from ((f"its argument {number}", held) for number, held in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield "its object", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield from ((name, held) for held in _content(cell))
        yield from _used_globals(value).items()
    elif isinstance(value, dict):
        yield from ((repr(key), held) for key, held in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"item {number}", held) for number, held in enumerate(value))
    elif not isinstance(value, type):
        yield from getattr(value, "__dict__", {}).items()


class _Pickler(ForkingPickler):
    def __init__(self, file: io.BytesIO, main: Main) -> None:
        super().__init__(file)
        self._main = main
        self._namespaces: dict[int, _Namespace] = {}

    def reducer_override(self, value: Any) -> Any:
        made = isinstance(value, type) and value.__flags__ & _HEAP_TYPE
        if isinstance(value, types.FunctionType) or made:
            if self._main == "all" and value in _ORIGINS:
                return _original, (_ORIGINS[value],)
            if self._has_name(value):
                return NotImplemented
            _SENT[id(value)] = value
            return self._class(value) if made else self._function(value)
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, types.CodeType):
            return marshal.loads, (marshal.dumps(value),)
        if isinstance(value, types.CellType):
            return _empty_cell, (), _content(value), None, None, _fill_cell
        if isinstance(value, property):
            return property, (value.fget, value.fset, value.fdel, value.__doc__)
        if isinstance(value, staticmethod | classmethod):
            return type(value), (value.__func__,)
        if isinstance(value, types.MappingProxyType):
            return _proxy, (dict(value),)
        if type(value).__module__ == "dataclasses":
            # Its markers are compared by identity.
            for name, held in vars(dataclasses).items():
                if held is value:
                    return getattr, (dataclasses, name)
        return NotImplemented

    def _has_name(self, value: Any) -> bool:
        """Whether the other process finds this function or class by its name."""
        module = sys.modules.get(value.__module__ or "")
        found: Any = module
        for part in value.__qualname__.split("."):
            found = getattr(found, part, None)
        if module is None or found is not value:
            return False
        if module is sys.modules["__main__"]:
            in_file = not _file_of(value).startswith("<")
            return self._main == "all" or (self._main == "script" and in_file)
        return _importable(module)

    def _function(self, value: types.FunctionType) -> Any:
        namespace = self._namespace(value)
        state = {
            "globals": {} if namespace.exists else _used_globals(value),
            "modules": [] if namespace.exists else _used_modules(value),
            "attributes": {
                name: getattr(value, name)
                for name in ("__module__", "__qualname__", "__doc__", "__defaults__",
                             "__kwdefaults__", "__annotations__")
            },
            "dict": vars(value),
            "origin": id(value),
        }  # fmt: skip
        args = value.__code__, namespace, value.__name__, value.__closure__
        return _make_function, args, state, None, None, _fill_function

    def _namespace(self, value: types.FunctionType) -> _Namespace:
        """One for all functions with the same globals."""
        held = value.__globals__
        if id(held) not in self._namespaces:
            name = str(held.get("__name__", "__main__"))
            module = sys.modules.get(name)
            own = module is not None and vars(module) is held
            main = module is sys.modules["__main__"]
            exists = own and (self._main != "none" if main else _importable(module))
            self._namespaces[id(held)] = _Namespace(name, exists, exists or (own and main))
        return self._namespaces[id(held)]

    def _class(self, value: type) -> Any:
        if issubclass(value, enum.Enum):
            raise UsageError(f"{value.__qualname__} is an Enum", "define it in a module")
        members = {
            name: held
            for name, held in vars(value).items()
            if name not in _OF_THE_CLASS_ITSELF and not isinstance(held, _DESCRIPTORS)
        }
        slots = {name: members.pop(name) for name in ("__slots__",) if name in members}
        names = {name: getattr(value, name) for name in ("__module__", "__qualname__")}
        args = type(value), value.__name__, value.__bases__, names | slots
        return _make_class, args, (members, id(value)), None, None, _fill_class


class _Namespace:
    """The globals of functions: a module's in the other process, or new ones."""

    def __init__(self, name: str, exists: bool, of_module: bool) -> None:
        self.name, self.exists, self._of_module = name, exists, of_module

    def __reduce__(self) -> Any:
        return _open_namespace, (self.name, self._of_module)


def _open_namespace(name: str, of_module: bool) -> dict[str, Any]:
    if of_module:
        return vars(importlib.import_module(name))
    return {"__name__": name, "__builtins__": builtins}


def _make_function(
    code: types.CodeType,
    namespace: dict[str, Any],
    name: str,
    closure: tuple[types.CellType, ...] | None,
) -> types.FunctionType:
    return types.FunctionType(code, namespace, name, None, closure)


def _fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    for module in state["modules"]:
        importlib.import_module(module)
    function.__globals__.update(state["globals"])
    for name, value in state["attributes"].items():
        setattr(function, name, value)
    vars(function).update(state["dict"])
    _ORIGINS[function] = state["origin"]


def _make_class(kind: Any, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
    return types.new_class(name, bases, {"metaclass": kind}, lambda held: held.update(members))


def _fill_class(made: type, state: tuple[dict[str, Any], int]) -> None:
    members, _ORIGINS[made] = state
    for name, value in members.items():
        setattr(made, name, value)


def _original(origin: int) -> Any:
    return _SENT[origin]


def _empty_cell() -> types.CellType:
    return types.CellType()


def _fill_cell(cell: types.CellType, content: tuple[Any, ...]) -> None:
    for value in content:
        cell.cell_contents = value


def _content(cell: types.CellType) -> tuple[Any, ...]:
    """Of one element, or of none while nothing has been assigned."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _proxy(held: dict[Any, Any]) -> types.MappingProxyType[Any, Any]:
    return types.MappingProxyType(held)


def _importable(module: types.ModuleType | None) -> bool:
    return getattr(module, "__spec__", None) is not None


def _file_of(value: Any) -> str:
    """The file that defines a function or a class, as the compiler was given it."""
    functions = [value] if isinstance(value, types.FunctionType) else vars(value).values()
    files = (f.__code__.co_filename for f in functions if isinstance(f, types.FunctionType))
    return next(files, "")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _used_globals(function: types.FunctionType) -> dict[str, Any]:
    names = {
        step.argval
        for code in _codes(function.__code__)
        for step in dis.get_instructions(code)
        if step.opname in _LOADS
    }
    held = function.__globals__
    return {name: held[name] for name in sorted(names) if name in held}


def _used_modules(function: types.FunctionType) -> list[str]:
    """Loaded submodules of the packages that a function uses: `import a.b` binds `a` alone."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    used = _used_globals(function).values()
    packages = {value.__name__ for value in used if isinstance(value, types.ModuleType)}
    return [
        module for module in sorted(sys.modules)
        if any(
            module.startswith(f"{package}.")
            and names.issuperset(module.removeprefix(f"{package}.").split("."))
            for package in packages
        )
    ]  # fmt: skip


class Sent:
    """A value that is pickled when the process that gets it is started."""

    def __init__(self, value: Any, main: Main) -> None:
        self.value, self.main = value, main

    def __reduce__(self) -> tuple[Callable[[bytes], Received], tuple[bytes]]:
        return Received, (dumps(self.value, self.main),)


class Received:
    """The same value in the process that got it, which opens it where it can report an error."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def open(self) -> Any:
        return loads(self._data)


class Result:
    """What a rank returned. Opened as soon as it is read: its tensors may be shared with a process
    that ends then."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Callable[[bytes], Opened], tuple[bytes]]:
        return Opened, (self._data,)


class Opened:
    def __init__(self, data: bytes) -> None:
        self.value: Any = None
        self.error: str | None = None
        try:
            self.value = loads(data)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
