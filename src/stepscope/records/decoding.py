"""JSON from files and processes that may be damaged: every failure is a `msgspec.DecodeError`."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import msgspec

Kind = TypeVar("Kind")


@overload
def from_json(data: bytes | bytearray | str) -> Any: ...


@overload
def from_json(data: bytes | bytearray | str, kind: type[Kind]) -> Kind: ...


def from_json(data: bytes | bytearray | str, kind: Any = Any) -> Any:
    """`msgspec.json.decode`, which raises other exceptions for text that is not UTF-8 and for text
    that is nested too deeply."""
    try:
        return msgspec.json.decode(data, type=kind)
    except UnicodeError as error:
        raise msgspec.DecodeError("it is not valid UTF-8") from error
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
