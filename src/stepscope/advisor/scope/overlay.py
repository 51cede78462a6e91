"""Run the text of a patch in place of the files of a script, which stay as they are."""

from __future__ import annotations

import os
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import msgspec

_TEXTS: dict[str, bytes] = {}


def write_overlay(path: Path, files: dict[str, bytes]) -> None:
    path.write_bytes(msgspec.json.encode(files))


def use_overlay(path: Path) -> None:
    """Compile these texts whenever their files are imported; cached bytecode is of the files."""
    _TEXTS.update(msgspec.json.decode(path.read_bytes(), type=dict[str, bytes]))
    plain = SourceFileLoader.get_code

    def get_code(loader: Any, fullname: str) -> CodeType | None:
        file = os.path.realpath(loader.get_filename(fullname))
        if file not in _TEXTS:
            return plain(loader, fullname)
        return loader.source_to_code(_TEXTS[file], loader.path)  # type: ignore[no-any-return]

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def source_of(path: Path) -> bytes:
    """Return the text of a script."""
    text = _TEXTS.get(os.path.realpath(path))
    return path.read_bytes() if text is None else text
