"""Output to standard error: every message of the command line passes through this module.

Messages quote record files, stores, scripts and workers, whose text may contain terminal control
sequences; these are escaped.
"""

from __future__ import annotations

import sys

from stepscope.errors import printable


def log(text: object) -> None:
    """Write one line prefixed with `stepscope:`."""
    write_line(f"stepscope: {text}")


def write_line(text: str) -> None:
    """Write one line to standard error, with control characters escaped."""
    print(printable(text), file=sys.stderr, flush=True)
