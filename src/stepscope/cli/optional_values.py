"""Help text and errors for optional options: `FLOAT` instead of `{None}|FLOAT`."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

_TYPE_NAMES = {float: "a number", int: "an integer", str: "a string", Path: "a path"}


def optional_values() -> ConstructorRegistry:
    """Registry that shows an optional value as its type; `None` is never typed by a user."""
    registry = ConstructorRegistry()
    registry.primitive_rule(_rule)
    return registry


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
