"""Options that may be left out: in help and errors they read as their values do."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

_SORTS = {float: "a number", int: "a whole number", str: "a text", Path: "a path"}


def optional_values() -> ConstructorRegistry:
    """What tyro would call `{None}|FLOAT` is a FLOAT; nobody types None."""
    registry = ConstructorRegistry()
    registry.primitive_rule(_rule)
    return registry


def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type_origin not in (typing.Union, types.UnionType):
        return None
    kinds = [kind for kind in typing.get_args(info.type) if kind is not types.NoneType]
    if len(kinds) != 1 or kinds[0] not in _SORTS:
        return None
    (kind,) = kinds

    def read(words: list[str]) -> Any:
        try:
            return kind(words[0])
        except ValueError:
            raise ValueError(f"{words[0]!r} is not {_SORTS[kind]}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda held: held is None or isinstance(held, kind),
        str_from_instance=lambda held: ["none" if held is None else str(held)],
    )
