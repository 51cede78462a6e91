"""Standard error: the one place where the command line writes to it.

Messages quote record files, stores, scripts and workers, whose text must not control the terminal.
"""

from __future__ import annotations

import sys

from stepscope.errors import printable


def log(text: object) -> None:
    """A line with the program's name in front."""
    write_line(f"stepscope: {text}")


def write_line(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
