"""Floating-point dtypes as arithmetic: range, spacing, rounding of sums, bit by bit. No torch."""

from __future__ import annotations

import math
from fractions import Fraction

import msgspec

from stepscope.errors import unknown_name


class FloatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A binary floating-point format with subnormal numbers."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    storage_bits: int

    @property
    def bias(self) -> int:
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def largest(self) -> float:
        return float((2 - Fraction(1, 2**self.mantissa_bits)) * Fraction(2) ** self.bias)

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger number."""
        return 2.0**-self.mantissa_bits

    @property
    def squares(self) -> tuple[float, float]:
        """Values below the first have squares that round to zero; from the second on, overflow."""
        beyond = self.largest + self.step_at(self.largest) / 2
        return math.sqrt(self.smallest / 2), math.sqrt(beyond)

    def step_at(self, value: float) -> float:
        """Distance from a value to the next larger one."""
        exponent = math.floor(math.log2(abs(value))) if value else 1 - self.bias
        return 2.0 ** (max(exponent, 1 - self.bias) - self.mantissa_bits)

    def nearest(self, value: float) -> float:
        """Round to the format, ties to even; infinite beyond the range."""
        if value == 0 or not math.isfinite(value):
            return value
        step = Fraction(self.step_at(value))
        rounded = float(round(Fraction(value) / step) * step)
        return rounded if abs(rounded) <= self.largest else math.copysign(math.inf, value)

    def stalls_at(self, term: float) -> float:
        """Smallest sum that adding `term` no longer changes: `term` is at most half a spacing."""
        rounded = self.nearest(term)
        power = math.ceil(math.log2(2 * rounded)) + self.mantissa_bits
        while self.nearest(2.0 ** (power - 1) + rounded) == 2.0 ** (power - 1):
            power -= 1
        return 2.0**power


FORMATS: dict[str, FloatFormat] = {
    fmt.name: fmt
    for fmt in (
        FloatFormat(name="float32", exponent_bits=8, mantissa_bits=23, storage_bits=32),
        FloatFormat(name="tf32", exponent_bits=8, mantissa_bits=10, storage_bits=32),
        FloatFormat(name="float16", exponent_bits=5, mantissa_bits=10, storage_bits=16),
        FloatFormat(name="bfloat16", exponent_bits=8, mantissa_bits=7, storage_bits=16),
    )
}


def float_format(name: str) -> FloatFormat:
    """Return the format of that name; raise UsageError if it is unknown."""
    if name not in FORMATS:
        raise unknown_name("dtype", name, FORMATS)
    return FORMATS[name]


class Alignment(msgspec.Struct, frozen=True, kw_only=True):
    """Two numbers as an adder sees them: the smaller is shifted until the exponents agree."""

    larger: str
    """Binary digits of the larger number, one before the point."""
    smaller: str
    shifted: str
    """Digits of the smaller number at the larger one's exponent, with a bar after the last digit
    that fits."""
    total: str
    """Digits of the rounded sum."""
    exponent: int
    """Exponent of the larger number, used for all aligned digits."""
    gap: int
    result: float


def align(larger: float, smaller: float, form: FloatFormat) -> Alignment:
    """Add two positive normal numbers digit by digit."""
    high, low = _exponent(form.nearest(larger)), _exponent(form.nearest(smaller))
    digits = _digits(form.nearest(smaller), form)
    gap = high - low
    shifted, width = "0" * gap + digits, form.mantissa_bits + 1
    result = form.nearest(form.nearest(larger) + form.nearest(smaller))
    return Alignment(
        larger=_pointed(_digits(form.nearest(larger), form)),
        smaller=_pointed(digits),
        shifted=f"{_pointed(shifted[:width])}|{shifted[width:]}",
        total=_pointed(_digits(result, form)),
        exponent=high,
        gap=gap,
        result=result,
    )


def _exponent(value: float) -> int:
    return math.floor(math.log2(value))


def _digits(value: float, fmt: FloatFormat) -> str:
    scaled = Fraction(value) / Fraction(2) ** _exponent(value) * 2**fmt.mantissa_bits
    return format(int(scaled), f"0{fmt.mantissa_bits + 1}b")


def _pointed(digits: str) -> str:
    return f"{digits[0]}.{digits[1:]}"
