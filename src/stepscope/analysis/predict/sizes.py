"""Sizes of memory as users write them."""

from __future__ import annotations

import re

from stepscope.errors import UsageError

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 10**3), ("IB", 2**10))
}
_SIZE = re.compile(r"\s*([0-9.]+)\s*([a-z]*)\s*", re.IGNORECASE)


def bytes_of(size: str | int, without_unit: str = "") -> int:
    """Return the bytes of "60GiB", "60 GB", or of a number in the unit of those without one:
    bytes."""
    found = _SIZE.fullmatch(str(size))
    unit = _UNITS.get((found[2] or without_unit).upper()) if found else None
    try:
        count = int(float(found[1]) * unit) if found and unit else 0
    except ValueError:
        count = 0
    if count <= 0:
        raise UsageError(
            f"{size!r} is not a size of memory",
            f'give a number of {without_unit or "bytes"}, or a size such as "60GiB"',
        )
    return count
