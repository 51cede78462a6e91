"""Number formatting, used by all outputs of the project.

A table cell, a finding, a tick label and a terminal line format the same number the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from stepscope.analysis.verdict import AtMost, Share
from stepscope.report.blocks import Cell, Column, Interval, Spread

DASH = "–"
MINUS = "−"
UP_TO = "≤ "
"""Mark of an upper bound: a number that rests on a doubtful ceiling."""

Scale = tuple[float, str]
"""Divisor of a value and the suffix of the result."""

_TIMES: Sequence[Scale] = ((1e-3, " µs"), (1.0, " ms"), (1e3, " s"))
_SIZES: Sequence[Scale] = tuple(
    (1024.0**power, f" {name}")
    for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
)
_PREFIXES: Sequence[tuple[float, str]] = tuple(
    (1000.0**power, name) for power, name in enumerate(("", "k", "M", "G", "T", "P", "E"))
)
_PERCENT: Scale = (0.01, " %")
_LEAST_PERCENT = 0.5e-4
"""Below this value four decimals would be zeros."""
_MAX_DECIMALS = 12


def number(value: float, digits: int = 4) -> str:
    """Format with `digits` significant digits; an int is exact. Exponents are used only for very
    large and very small values."""
    if isinstance(value, int):
        return f"{value:,}".replace("-", MINUS)
    if not math.isfinite(value) or value == 0:
        return _fixed(value, 0)
    exponent = _exponent(value, digits)
    if -5 < exponent < 15:
        return _fixed(value, max(0, digits - 1 - exponent))
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa}e{int(power)}".replace("-", MINUS)


def count(value: float) -> str:
    """Format an integer with separators; a mean of counts below 1000 keeps its fraction."""
    if math.isfinite(value) and abs(value) < 1000 and value != int(value):
        return number(value)
    return _fixed(value, 0)


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: 1 case, 2 cases."""
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


def listed(names: Sequence[str]) -> str:
    """Format names as in a sentence: a, b and c."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def duration(ms: Share, digits: int = 3) -> str:
    if isinstance(ms, AtMost):
        return f"{UP_TO}{duration(ms.value, digits)}"
    return _scaled(ms, _pick(ms, _TIMES, 1000, digits), digits)


def bytes_(n: float, digits: int = 3) -> str:
    return _scaled(n, _pick(n, _SIZES, 1024, digits), digits)


def rate(value: float, unit: str) -> str:
    return _scaled(value, _pick(value, _rates(unit), 1000, 3), 3)


def percent(fraction: Share) -> str:
    """Format with one decimal; a share below a tenth of a percent keeps its first digit."""
    if isinstance(fraction, AtMost):
        return f"{UP_TO}{percent(fraction.value)}"
    divisor, suffix = _PERCENT
    value = fraction / divisor
    if 0 < abs(value) < _LEAST_PERCENT:
        return number(value, 1) + suffix
    return _fixed(value, max(1, min(_decimals(value, 1), 4))) + suffix


def tick(value: float) -> str:
    """Format a round number as short as possible, for the axes of a figure."""
    if not math.isfinite(value) or value == 0:
        return _fixed(value, 0)
    divisor, prefix = (1.0, "") if abs(value) < 1e6 else _pick(value, _PREFIXES, 1000, 6)
    text = number(float(value / divisor), 6)
    mantissa, exponent_mark, power = text.partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}{exponent_mark}{power} {prefix}".rstrip()


def header_unit(column: Column) -> str:
    """The unit for the header, if the cells do not show it."""
    return "" if column.kind in ("bytes", "rate", "percent") else column.unit


def header(column: Column) -> str:
    unit = header_unit(column)
    return f"{column.title} ({unit})" if unit else column.title


@lru_cache(maxsize=1 << 17, typed=True)
def cell_text(cell: Cell, column: Column) -> str:
    if cell is None:
        return DASH
    if isinstance(cell, str):
        return cell
    if isinstance(cell, AtMost):
        return f"{UP_TO}{cell_text(cell.value, column)}"
    if isinstance(cell, Spread):
        return _spread_text(cell, column)
    if isinstance(cell, Interval):
        return _interval_text(cell, column)
    match column.kind:
        case "text" | "code":
            return str(cell) if isinstance(cell, int) else number(cell)
        case "number":
            return number(cell)
        case "count":
            return count(cell)
        case "percent":
            return percent(cell)
        case "bytes":
            return bytes_(cell)
        case "rate":
            return rate(cell, column.unit)


def _spread_text(cell: Spread, column: Column) -> str:
    (divisor, suffix), least = _column_scale(max(abs(cell.value), abs(cell.plus_minus)), column)
    value, plus_minus = cell.value / divisor, cell.plus_minus / divisor
    decimals = _shared_decimals(value, plus_minus, least)
    return f"{_fixed(value, decimals)} ± {_fixed(plus_minus, decimals)}{suffix}"


def _interval_text(cell: Interval, column: Column) -> str:
    (divisor, suffix), least = _column_scale(cell.value, column)
    value, low, high = (part / divisor for part in (cell.value, cell.low, cell.high))
    decimals = _shared_decimals(value, (high - low) / 2, least)
    return f"{_fixed(value, decimals)} [{_fixed(low, decimals)}, {_fixed(high, decimals)}]{suffix}"


def _column_scale(value: float, column: Column) -> tuple[Scale, int]:
    """The scale of a column's cell and its minimum number of significant digits."""
    match column.kind:
        case "percent":
            return _PERCENT, 3
        case "bytes":
            return _pick(value, _SIZES, 1024, 3), 3
        case "rate":
            return _pick(value, _rates(column.unit), 1000, 3), 3
        case _:
            return (1.0, ""), 4


def _shared_decimals(value: float, spread: float, digits: int) -> int:
    """Decimals for the value and for the first digit of the spread, unless the spread is much
    smaller."""
    if value == 0 or not math.isfinite(value):
        return _decimals(spread, 2)
    return min(max(_decimals(value, digits), _decimals(spread, 1)), _decimals(value, 6))


def _rates(unit: str) -> Sequence[Scale]:
    """Scales of a rate: the prefix is joined to an uppercase unit (TFLOP/s), else separated
    (`k launches/s`)."""
    gap = "" if unit[:1].isupper() else " "
    return tuple(
        (size, f" {prefix}{gap}{unit}".rstrip()) if prefix else (size, f" {unit}".rstrip())
        for size, prefix in _PREFIXES
    )


def _pick(value: float, scales: Sequence[Scale], limit: float, digits: int) -> Scale:
    """The first scale in which the rounded value is below the limit."""
    if not math.isfinite(value):
        return scales[0]
    if value == 0:
        return next(scale for scale in scales if scale[0] == 1)
    for scale in scales:
        small = abs(value) / scale[0]
        if round(small, _decimals(small, digits)) < limit:
            return scale
    return scales[-1]


def _scaled(value: float, scale: Scale, digits: int) -> str:
    divisor, suffix = scale
    small = value / divisor
    integer_bytes = suffix == " B" and float(small).is_integer()
    return _fixed(small, 0 if integer_bytes else _decimals(small, digits)) + suffix


def _decimals(value: float, digits: int) -> int:
    if value == 0 or not math.isfinite(value):
        return 0
    return min(max(0, digits - 1 - _exponent(value, digits)), _MAX_DECIMALS)


def _exponent(value: float, digits: int) -> int:
    """The power of ten after rounding, so that 999.96 counts as 1000."""
    return int(f"{value:.{digits - 1}e}".partition("e")[2])


def _fixed(value: float, decimals: int) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if not text.strip("-0.,") else text.replace("-", MINUS)
