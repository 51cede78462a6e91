"""Decode JSON that may be damaged: every failure is a `msgspec.DecodeError`."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, overload

import msgspec

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A 64-bit integer, as in SQLite; integers in JSON have no limit."""

Kind = TypeVar("Kind")


@overload
def from_json(data: bytes | bytearray | str) -> Any: ...


@overload
def from_json(data: bytes | bytearray | str, kind: type[Kind]) -> Kind: ...


def from_json(data: bytes | bytearray | str, kind: Any = Any) -> Any:
    """Decode JSON like `msgspec.json.decode`, but raise DecodeError also for text that is not UTF-8
    or is nested too deeply."""
    try:
        return msgspec.json.decode(data, type=kind)
    except UnicodeError as error:
        raise msgspec.DecodeError("it is not valid UTF-8") from error
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
