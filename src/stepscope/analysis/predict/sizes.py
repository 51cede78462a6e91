"""Sizes of memory as users write them."""

from __future__ import annotations

import re

from stepscope.errors import UsageError

_UNITS = {"": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*([0-9.]+)\s*([a-z]*)\s*", re.IGNORECASE)


def bytes_of(size: str | int) -> int:
    """Return the bytes of "60GiB", "60 GB" or a number of bytes."""
    found = _SIZE.fullmatch(str(size))
    unit = _UNITS.get(found[2].upper()) if found else None
    try:
        count = int(float(found[1]) * unit) if found and unit else 0
    except ValueError:
        count = 0
    if count <= 0:
        raise UsageError(
            f"{size!r} is not a size of memory", 'give a number of bytes, or a size such as "60GiB"'
        )
    return count
