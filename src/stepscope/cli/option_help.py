"""Help text of options: their types without `None`, only the defaults that say something, and no
line wider than the terminal."""

from __future__ import annotations

import ast
import inspect
import io
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec
import tyro
from tyro.constructors import (
    MISSING_NONPROP,
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

_TYPE_NAMES = {float: "a number", int: "an integer", str: "a string", Path: "a path"}
_SILENT = ("", "''", "none", "None", "False")
"""Defaults that are not mentioned: an option that is not given has no effect."""


def option_registry() -> ConstructorRegistry:
    """Registry that shows an optional value as its type and leaves out empty defaults."""
    registry = ConstructorRegistry()
    registry.primitive_rule(_rule)
    registry.struct_rule(_struct_rule)
    return registry


@contextmanager
def wrapped_usage() -> Iterator[None]:
    """Wrap the usage line of the help that is printed inside, which tyro does not."""
    output, sys.stdout = sys.stdout, _CapturedOutput(sys.stdout)
    try:
        yield
    finally:
        (captured, sys.stdout) = (sys.stdout, output)
        usage, newline, rest = captured.getvalue().partition("\n")
        output.write(_wrapped(usage, shutil.get_terminal_size().columns) + newline + rest)


class _CapturedOutput(io.StringIO):
    """Captured output, with the colors and characters that the actual output supports."""

    def __init__(self, output: TextIO) -> None:
        super().__init__()
        self._output = output

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._output.encoding

    def isatty(self) -> bool:
        return self._output.isatty()


def _wrapped(usage: str, width: int) -> str:
    lines = [""]
    for part in re.split(r" (?=\[)", usage):
        line = f"{lines[-1]} {part}" if lines[-1] else part
        if len(re.sub(r"\x1b\[[0-9;]*m", "", line)) > width and lines[-1]:
            lines.append(f"    {part}")
        else:
            lines[-1] = line
    return "\n".join(lines)


def default_hint(label: str) -> str:
    """The default of an option as its help shows it."""
    if label in _SILENT:
        return ""
    if label == "True":
        return "(on by default)"
    words = (word.removesuffix(".0") for word in label.split(" "))
    return f"(default: {' '.join(words)})"


def _struct_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    if not (isinstance(info.type, type) and issubclass(info.type, msgspec.Struct)):
        return None
    hints = typing.get_type_hints(info.type, include_extras=True)
    fields = []
    for field in msgspec.structs.fields(info.type):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if isinstance(info.default, info.type):
            default = getattr(info.default, field.name)
        shown = tyro.conf.arg(help_behavior_hint=default_hint)
        fields.append(
            StructFieldSpec(
                name=field.name,
                type=Annotated[hints[field.name], shown],  # type: ignore[arg-type]
                default=MISSING_NONPROP if default is msgspec.NODEFAULT else default,
                helptext=partial(_documented, info.type, field.name),
            )
        )
    return StructConstructorSpec(instantiate=info.type, fields=tuple(fields))


def _documented(struct: type, field: str) -> str | None:
    """The docstring below a field, of the class that declares it."""
    return next(
        (texts[field] for cls in struct.__mro__ if field in (texts := _docstrings(cls))), None
    )


@cache
def _docstrings(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}
    (declared, *_) = tree.body
    assert isinstance(declared, ast.ClassDef)
    texts = {}
    for statement, following in zip(declared.body, declared.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split())
    return texts


def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type_origin not in (typing.Union, types.UnionType):
        return None
    types_ = [type_ for type_ in typing.get_args(info.type) if type_ is not types.NoneType]
    if len(types_) != 1 or types_[0] not in _TYPE_NAMES:
        return None
    (type_,) = types_

    def read(words: list[str]) -> Any:
        try:
            return type_(words[0])
        except ValueError:
            raise ValueError(f"{words[0]!r} is not {_TYPE_NAMES[type_]}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=type_.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, type_),
        str_from_instance=lambda value: ["none" if value is None else str(value)],
    )
