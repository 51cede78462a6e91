"""Output of plain text: every message of the command line passes through this module.

Messages quote record files, stores, scripts and workers, whose text may contain terminal control
sequences; these are escaped.
"""

from __future__ import annotations

import sys

from stepscope.cli.program import as_typed
from stepscope.errors import printable


def log(text: object) -> None:
    """Write one line prefixed with `stepscope:`."""
    write_line(f"stepscope: {text}")


def say(text: str, end: str = "\n") -> None:
    """Write text to standard output, with control characters escaped."""
    print(printable(as_typed(text)), end=end)


def write_line(text: str) -> None:
    """Write one line to standard error, with control characters escaped."""
    print(printable(as_typed(text)), file=sys.stderr, flush=True)
