"""The words that start this program again in the shell that it was started from."""

from __future__ import annotations

import os
import re
import shutil
import sys
from functools import cache
from pathlib import Path

_NAME = "stepscope"
_COMMAND = re.compile(rf"(?<![\w./-]){_NAME} (?=[a-z])")


def as_typed(text: str) -> str:
    """Return the text with every command of Stepscope in the words that start it in this shell:
    after `make report`, `stepscope` is not on the PATH."""
    return _COMMAND.sub(lambda _: f"{_program()} ", text)


@cache
def _program() -> str:
    started = Path(sys.argv[0])
    if started.name == _NAME:
        return _shortest(started)
    if started.name != "__main__.py" or started.parent.name != _NAME:
        # Another program calls this one, such as a test.
        return _NAME
    installed = Path(sys.executable).with_name(_NAME)
    if installed.exists():
        return _shortest(installed)
    return f"{_shortest(Path(sys.executable))} -m {_NAME}"


def _shortest(path: Path) -> str:
    """The name alone if the PATH leads to the same file, or else the path, relative within the
    current directory."""
    path = Path(os.path.abspath(path))
    found = shutil.which(path.name)
    if found is not None and Path(os.path.abspath(found)) == path:
        return path.name
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
