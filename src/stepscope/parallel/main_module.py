"""The script that calls `launch`, which every rank imports."""

from __future__ import annotations

import ast
import contextlib
import sys
import threading
from collections.abc import Iterator
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from stepscope.errors import UsageError

GUARD = 'call launch under `if __name__ == "__main__":`'


def main_to_import() -> dict[str, str]:
    """Return the script or module that ranks import, as multiprocessing names it. Empty if there
    is none: a notebook, standard input, `python -c`, the `__main__` of a package."""
    data = spawn.get_preparation_data("rank")
    name, path = data.get("init_main_from_name"), data.get("init_main_from_path")
    if name is not None and name.rpartition(".")[2] != "__main__":
        return {"init_main_from_name": name}
    # multiprocessing does not import a script of that name either.
    if path is not None and Path(path).is_file() and Path(path).stem != "ipython":
        return {"init_main_from_path": path}
    return {}


@contextlib.contextmanager
def ranks_import_main() -> Iterator[None]:
    """Keep multiprocessing from importing the script before a rank can report an error: the ranks
    import it themselves. Applies to processes started by this thread."""
    original, thread = spawn.get_preparation_data, threading.get_ident()

    def prepared(name: str) -> dict[str, Any]:
        data = original(name)
        if threading.get_ident() == thread:
            for key in ("init_main_from_name", "init_main_from_path"):
                data.pop(key, None)
        return data

    spawn.get_preparation_data = prepared
    try:
        yield
    finally:
        spawn.get_preparation_data = original


def refuse_unguarded(main: dict[str, str]) -> None:
    """Raise immediately if a rank that imports the script is certain to call `launch` again.

    If that is not certain (the call is in a branch, or the script reads `__name__`), the rank
    detects it.
    """
    path = getattr(sys.modules["__main__"], "__file__", None)
    if not main or path is None:
        return
    line = _line_in(path)
    if line is None:
        return
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, ValueError, SyntaxError):
        return
    reads_name = any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(tree))
    branches = (ast.If, ast.Try, ast.While, ast.Match)
    within = any(
        isinstance(node, branches) and node.lineno <= line <= (node.end_lineno or node.lineno)
        for node in ast.walk(tree)
    )
    if not reads_name and not within:
        raise UsageError(f"every rank imports {path}, which calls launch in line {line}", GUARD)


def _line_in(path: str) -> int | None:
    """Line of the script's top level from which this call comes; None if there is none."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename == path:
            return frame.f_lineno
    return None
