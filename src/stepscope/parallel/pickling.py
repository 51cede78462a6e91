"""Pickle functions, arguments and results that are sent between a launcher and its ranks.

Pickle sends a function or class as a name that the other process imports. That fails for objects
without an importable name: a lambda, a local function, and everything defined in a notebook, on
standard input, with `python -c` or by `exec`. Those are sent by value: the code, the closure, and
the globals that the code uses. Both processes run the same interpreter, so code objects are
compatible.
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

_CLASS_INTERNALS = {"__dict__", "__weakref__", "_abc_impl"}
_HEAP_TYPE = 1 << 9
"""Flag of a class created by Python code; classes of C modules are not sent by value."""
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)


_SENT: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Functions and classes that this process has sent by value, by id."""
_ORIGINS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Functions and classes that this process received, with their id in the sending process. A result
that refers to one resolves to the launcher's original."""
Main = Literal["script", "all", "none"]
"""The names of `__main__` that exist in the other process: those defined by the script's file (and
not those that `exec` added), all of them, or none."""


def dumps(value: Any, main: Main) -> bytes:
    file = io.BytesIO()
    _Pickler(file, main).dump(value)
    return file.getvalue()


loads = pickle.loads
"""Only for data from a live process of this job, never from a file."""


def why_not(value: Any, main: Main, seen: frozenset[int] = frozenset()) -> str | None:
    """Describe the part of a value that cannot be sent, and why; None if all of it can."""
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
    """Yield the parts of a value with names that its author recognizes."""
    if isinstance(value, functools.partial):
        yield "its function", value.func
        yield from ((f"its argument {index}", part) for index, part in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield "its object", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield from ((name, part) for part in _content(cell))
        yield from _used_globals(value).items()
    elif isinstance(value, dict):
        yield from ((repr(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"item {index}", part) for index, part in enumerate(value))
    elif not isinstance(value, type):
        yield from getattr(value, "__dict__", {}).items()


class _Pickler(ForkingPickler):
    def __init__(self, file: io.BytesIO, main: Main) -> None:
        super().__init__(file)
        self._main = main
        self._namespaces: dict[int, _Namespace] = {}

    def reducer_override(self, value: Any) -> Any:
        python_class = isinstance(value, type) and value.__flags__ & _HEAP_TYPE
        if isinstance(value, types.FunctionType) or python_class:
            if self._main == "all" and value in _ORIGINS:
                return _original, (_ORIGINS[value],)
            if self._has_name(value):
                return NotImplemented
            _SENT[id(value)] = value
            return self._class(value) if python_class else self._function(value)
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
            # The markers of dataclasses are compared by identity.
            for name, marker in vars(dataclasses).items():
                if marker is value:
                    return getattr, (dataclasses, name)
        return NotImplemented

    def _has_name(self, value: Any) -> bool:
        """True if the other process can import this function or class by its name."""
        module = sys.modules.get(value.__module__ or "")
        resolved: Any = module
        for part in value.__qualname__.split("."):
            resolved = getattr(resolved, part, None)
        if module is None or resolved is not value:
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
                for name in (
                    "__module__",
                    "__qualname__",
                    "__doc__",
                    "__defaults__",
                    "__kwdefaults__",
                    "__annotations__",
                )
            },
            "dict": vars(value),
            "origin": id(value),
        }
        args = value.__code__, namespace, value.__name__, value.__closure__
        return _make_function, args, state, None, None, _fill_function

    def _namespace(self, value: types.FunctionType) -> _Namespace:
        """One namespace for all functions with the same globals."""
        variables = value.__globals__
        if id(variables) not in self._namespaces:
            name = str(variables.get("__name__", "__main__"))
            module = sys.modules.get(name)
            own = module is not None and vars(module) is variables
            main = module is sys.modules["__main__"]
            exists = own and (self._main != "none" if main else _importable(module))
            self._namespaces[id(variables)] = _Namespace(name, exists, exists or (own and main))
        return self._namespaces[id(variables)]

    def _class(self, value: type) -> Any:
        if issubclass(value, enum.Enum):
            raise UsageError(f"{value.__qualname__} is an Enum", "define it in a module")
        members = {
            name: member
            for name, member in vars(value).items()
            if name not in _CLASS_INTERNALS and not isinstance(member, _DESCRIPTORS)
        }
        slots = {name: members.pop(name) for name in ("__slots__",) if name in members}
        names = {name: getattr(value, name) for name in ("__module__", "__qualname__")}
        args = type(value), value.__name__, value.__bases__, names | slots
        return _make_class, args, (members, id(value)), None, None, _fill_class


class _Namespace:
    """The globals of functions: those of a module in the other process, or new ones."""

    def __init__(self, name: str, exists: bool, of_module: bool) -> None:
        self.name, self.exists, self._of_module = name, exists, of_module

    def __reduce__(self) -> Any:
        return _open_namespace, (self.name, self._of_module)


def _open_namespace(name: str, of_module: bool) -> dict[str, Any]:
    variables: dict[str, Any] = {"__name__": name}
    if of_module:
        variables = vars(importlib.import_module(name))
    # `__main__` of a rank may lack them, but an import in C code looks them up in the globals.
    variables.setdefault("__builtins__", builtins)
    return variables


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
    return types.new_class(name, bases, {"metaclass": kind}, lambda body: body.update(members))


def _fill_class(cls: type, state: tuple[dict[str, Any], int]) -> None:
    members, _ORIGINS[cls] = state
    for name, value in members.items():
        setattr(cls, name, value)


def _original(origin: int) -> Any:
    return _SENT[origin]


def _empty_cell() -> types.CellType:
    return types.CellType()


def _fill_cell(cell: types.CellType, content: tuple[Any, ...]) -> None:
    for value in content:
        cell.cell_contents = value


def _content(cell: types.CellType) -> tuple[Any, ...]:
    """The content in a tuple; empty if nothing has been assigned."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _proxy(mapping: dict[Any, Any]) -> types.MappingProxyType[Any, Any]:
    return types.MappingProxyType(mapping)


def _importable(module: types.ModuleType | None) -> bool:
    return getattr(module, "__spec__", None) is not None


def _file_of(value: Any) -> str:
    """The file that defines a function or class, as passed to the compiler."""
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
    variables = function.__globals__
    return {name: variables[name] for name in sorted(names) if name in variables}


def _used_modules(function: types.FunctionType) -> list[str]:
    """Loaded submodules of the packages that a function uses: `import a.b` only binds `a`."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    used = _used_globals(function).values()
    packages = {value.__name__ for value in used if isinstance(value, types.ModuleType)}
    return [
        module
        for module in sorted(sys.modules)
        if any(
            module.startswith(f"{package}.")
            and names.issuperset(module.removeprefix(f"{package}.").split("."))
            for package in packages
        )
    ]


class Sent:
    """A value that is pickled when the process that receives it is started."""

    def __init__(self, value: Any, main: Main) -> None:
        self.value, self.main = value, main

    def __reduce__(self) -> tuple[Callable[[bytes], Received], tuple[bytes]]:
        return Received, (dumps(self.value, self.main),)


class Received:
    """The value in the receiving process, unpickled where an error can be reported."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def open(self) -> Any:
        return loads(self._data)


class Result:
    """The return value of a rank. Unpickled as soon as it is read, because its tensors may be
    shared with a process that is about to exit."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Callable[[bytes], Opened], tuple[bytes]]:
        return Opened, (self._data,)


class Opened:
    """A result after unpickling: its value, or the error."""

    def __init__(self, data: bytes) -> None:
        self.value: Any = None
        self.error: str | None = None
        try:
            self.value = loads(data)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
