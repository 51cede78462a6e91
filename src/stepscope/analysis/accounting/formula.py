"""Formulas as text: evaluated exactly, and shown with symbols or with numbers.

Formula("2*(N-1)/N*S/W").text()                                     2·(N − 1)/N·S/W
Formula("2*(N-1)/N*S/W").text({"N": 8, "S": 80, "W": 10})           2·(8 − 1)/8·80/10
Formula("2*(N-1)/N*S/W").value({"N": 8, "S": 80, "W": 10})          14
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Number = int | float | Fraction

_OPERATORS: dict[type[ast.operator], tuple[int, str, Callable[[Any, Any], Any]]] = {
    ast.Add: (1, " + ", operator.add),
    ast.Sub: (1, " − ", operator.sub),
    ast.Mult: (2, "·", operator.mul),
    ast.Div: (2, "/", lambda a, b: a / b if isinstance(a, float) else Fraction(a) / b),
    ast.Pow: (3, "^", operator.pow),
}
_COMPARISONS: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.LtE: ("≤", operator.le),
    ast.Lt: ("<", operator.lt),
    ast.GtE: ("≥", operator.ge),
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "max": max,
    "min": min,
    "ceil": math.ceil,
    "floor": math.floor,
    "sqrt": math.sqrt,
}
_ATOM = 4
_PLAIN_DIGITS = 10**7
_LONGEST = 1e15
_MAX_DECIMALS = 8


class Formula:
    """An expression, or a comparison of two, of numbers, symbols and a few functions."""

    def __init__(self, source: str) -> None:
        self._tree = ast.parse(source, mode="eval").body

    def value(self, names: Mapping[str, Number]) -> Any:
        """Evaluate: exact while everything is rational; a bool for a comparison."""
        return _value(self._tree, names)

    def text(self, names: Mapping[str, Number] | None = None) -> str:
        """Show the formula, with numbers in place of the symbols if `names` has them."""
        return _text(self._tree, names)[0]


def _value(node: ast.expr, names: Mapping[str, Number]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)][2](_value(left, names), _value(right, names))
        case ast.Call(func=ast.Name(id=name), args=args):
            return _FUNCTIONS[name](*(_value(arg, names) for arg in args))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _COMPARISONS[type(op)][1](_value(left, names), _value(right, names))
    raise ValueError(f"not part of a formula: {ast.unparse(node)}")


def _text(node: ast.expr, names: Mapping[str, Number] | None) -> tuple[str, int]:
    """The text of a part and its precedence."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return number(value), _ATOM
        case ast.Name(id=name):
            return (name if names is None else number(names[name])), _ATOM
        case ast.BinOp(left=left, op=op, right=right):
            precedence, sign, _ = _OPERATORS[type(op)]
            first, above = _text(left, names)
            second, below = _text(right, names)
            if above < precedence:
                first = f"({first})"
            # a·(b/c) and a/(b·c) keep their parentheses: without, they read as another formula.
            if below < precedence or (below == precedence and not _plain_chain(op, right)):
                second = f"({second})"
            return f"{first}{sign}{second}", precedence
        case ast.Call(func=ast.Name(id=name), args=args):
            return f"{name}({', '.join(_text(arg, names)[0] for arg in args)})", _ATOM
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            sign = _COMPARISONS[type(op)][0]
            return f"{_text(left, names)[0]} {sign} {_text(right, names)[0]}", 0
    raise ValueError(f"not part of a formula: {ast.unparse(node)}")


def _plain_chain(op: ast.operator, right: ast.expr) -> bool:
    return isinstance(op, ast.Add) or (
        isinstance(op, ast.Mult) and isinstance(right, ast.BinOp) and isinstance(right.op, ast.Mult)
    )


def number(value: Number) -> str:
    """A number within a formula: exact if it is short, else with four digits."""
    size = abs(float(value))
    if value == int(value) and size < _PLAIN_DIGITS:
        return str(int(value))
    if 1e-3 <= size < _PLAIN_DIGITS:
        return f"{float(value):.4g}" if size < 1e4 else f"{float(value):.0f}"
    digits, _, exponent = f"{float(value):.3e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


_PREFIXED = {"B", "FLOP", "B/s", "FLOP/s", "s"}


def quantity(value: Number, unit: str) -> str:
    """A value with its unit: 3.52 TB, 1.2 ms, 1,278 tokens."""
    size = float(value)
    if unit in _PREFIXED:
        prefixes = {0: "", -1: "m", -2: "µ", -3: "n"} if unit == "s" else dict(enumerate(" kMGTPE"))
        power = math.floor(math.log10(abs(float(f"{size:.2e}"))) / 3 + 1e-9) if size else 0
        power = min(max(power, min(prefixes)), max(prefixes))
        digits = _three_digits(size / 1000.0**power)
        unit = "bytes" if unit == "B" and not power else prefixes[power].strip() + unit
        return f"{digits} {unit}"
    return f"{_plain_digits(size)} {unit}".rstrip()


def _plain_digits(size: float) -> str:
    """Four significant digits, and more if they would look like an integer that it is not: a limit
    of 14.998 devices is not 15."""
    if size == int(size):
        return f"{int(size):,}" if abs(size) < _LONGEST else f"{size:.3e}"
    decimals = max(0, 3 - math.floor(math.log10(abs(size))))
    while decimals < _MAX_DECIMALS and float(f"{size:.{decimals}f}").is_integer():
        decimals += 1
    return f"{size:,.{decimals}f}" if decimals < _MAX_DECIMALS else f"{size:.3e}"


def _three_digits(size: float) -> str:
    """At least three significant digits, without an exponent from 0.001 up."""
    if abs(size) >= 100 or not size:
        return f"{size:,.0f}" if abs(size) >= 1000 or size == int(size) else f"{size:.4g}"
    return f"{size:.3g}" if abs(size) >= 1e-3 else f"{size:.2e}"
