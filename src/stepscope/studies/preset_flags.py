"""The flags of a study in each preset, from `presets.toml`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import msgspec

F = TypeVar("F", bound=msgspec.Struct)
_ON_CPU = "_cpu"


def preset_flags(study: str, flags: type[F], device_kind: str) -> Mapping[str, tuple[F, ...]]:
    """The sweeps of each preset on this kind of device; empty for a study that is not in the
    file."""
    presets = _file().get(study, {})

    def sweeps(name: str) -> Iterator[F]:
        chosen = f"{name}{_ON_CPU}" if device_kind == "cpu" else name
        for entry in presets.get(chosen, presets.get(name, ())):
            if isinstance(entry, str):
                yield from sweeps(entry)
            else:
                yield msgspec.convert(entry, flags)

    names = dict.fromkeys(name.removesuffix(_ON_CPU) for name in presets)
    return {name: tuple(sweeps(name)) for name in names}


@cache
def _file() -> dict[str, dict[str, list[Any]]]:
    text = resources.files("stepscope.studies").joinpath("presets.toml").read_bytes()
    presets: dict[str, dict[str, list[Any]]] = msgspec.toml.decode(text)
    return presets
