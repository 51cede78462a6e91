"""Formulas of positions: what an element of an integer or boolean tensor is, as a function of its
indices. Two formulas are compared as formulas, so an answer holds for every length.

Integers are linear: a sum of terms with integer coefficients. A term is an index variable or the
load of an element of a tensor whose values are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Load:
    """An element of a tensor with unknown values."""

    tensor: Any
    index: tuple[Linear, ...]


Term = str | Load
"""The name of an index variable, or a load."""


@dataclass(frozen=True)
class Linear:
    """A sum of terms with integer coefficients, plus a constant."""

    terms: frozenset[tuple[Term, int]] = frozenset()
    constant: int = 0

    @classmethod
    def of(cls, coefficients: Mapping[Term, int], constant: int = 0) -> Linear:
        return cls(frozenset((t, c) for t, c in coefficients.items() if c), constant)

    def __add__(self, other: Linear) -> Linear:
        total = dict(self.terms)
        for term, coefficient in other.terms:
            total[term] = total.get(term, 0) + coefficient
        return Linear.of(total, self.constant + other.constant)

    def times(self, factor: int) -> Linear:
        return Linear.of({t: c * factor for t, c in self.terms}, self.constant * factor)

    def __sub__(self, other: Linear) -> Linear:
        return self + other.times(-1)

    @property
    def is_constant(self) -> bool:
        return not self.terms


@dataclass(frozen=True)
class Absolute:
    """The absolute value of an integer, or minus that."""

    of: Linear
    sign: int = 1


@dataclass(frozen=True)
class AtMostZero:
    """True where the integer is at most zero."""

    value: Linear


@dataclass(frozen=True)
class Zero:
    """True where the integer is zero."""

    value: Linear


@dataclass(frozen=True)
class Flag:
    """An element of a boolean tensor with unknown values."""

    load: Load


@dataclass(frozen=True)
class Not:
    of: Zero | Flag


@dataclass(frozen=True)
class Both:
    """True where all parts are."""

    parts: frozenset[Condition]


@dataclass(frozen=True)
class Either:
    """True where one part is."""

    parts: frozenset[Condition]


Condition = AtMostZero | Zero | Flag | Not | Both | Either
ALWAYS = Both(frozenset())
NEVER = Either(frozenset())


@dataclass(frozen=True)
class Choice:
    """One of two numbers: an additive mask, or a triangle of ones."""

    condition: Condition
    if_true: float
    if_false: float


@dataclass(frozen=True)
class Weight:
    """An element of a tensor of floats with unknown values, times a number."""

    load: Load
    factor: float = 1.0


@dataclass(frozen=True)
class Penalty:
    """A weight times an integer, where the condition is true; elsewhere a score that hides."""

    weight: Weight
    distance: Linear | Absolute
    condition: Condition = ALWAYS
    hidden: float | None = None


Number = Linear | Absolute | Choice | float
Value = Number | Condition | Weight | Penalty


def integer(value: int) -> Linear:
    return Linear(frozenset(), value)


def variable(name: str) -> Linear:
    return Linear.of({name: 1})


def at_most_zero(value: Linear) -> Condition:
    if value.is_constant:
        return ALWAYS if value.constant <= 0 else NEVER
    return AtMostZero(value)


def is_zero(value: Linear) -> Condition:
    if value.is_constant:
        return NEVER if value.constant else ALWAYS
    return Zero(value)


def both(*parts: Condition) -> Condition:
    flat: set[Condition] = set()
    for part in parts:
        flat |= part.parts if isinstance(part, Both) else {part}
    if NEVER in flat:
        return NEVER
    return next(iter(flat)) if len(flat) == 1 else Both(frozenset(flat))


def either(*parts: Condition) -> Condition:
    flat: set[Condition] = set()
    for part in parts:
        flat |= part.parts if isinstance(part, Either) else {part}
    if ALWAYS in flat:
        return ALWAYS
    return next(iter(flat)) if len(flat) == 1 else Either(frozenset(flat))


def negated(condition: Condition) -> Condition:
    match condition:
        case AtMostZero(value):
            return at_most_zero(integer(1) - value)
        case Not(of):
            return of
        case Both(parts):
            return either(*map(negated, parts))
        case Either(parts):
            return both(*map(negated, parts))
    return Not(condition)


def variables(formula: Linear | Condition) -> frozenset[str]:
    """Return the names of the index variables that a formula depends on."""
    match formula:
        case Linear(terms):
            found = [
                frozenset([term]) if isinstance(term, str) else _of_load(term) for term, _ in terms
            ]
        case AtMostZero(value) | Zero(value):
            found = [variables(value)]
        case Flag(load):
            found = [_of_load(load)]
        case Not(of):
            found = [variables(of)]
        case Both(parts) | Either(parts):
            found = [variables(part) for part in parts]
    return frozenset().union(*found)


def _of_load(load: Load) -> frozenset[str]:
    return frozenset().union(*map(variables, load.index))


def compared(name: str, left: Number, right: Number) -> Condition | None:
    """Return the condition of a comparison: "lt", "le", "gt", "ge", "eq" or "ne"."""
    if name in ("gt", "ge"):
        return compared({"gt": "lt", "ge": "le"}[name], right, left)
    if name == "ne":
        equal = compared("eq", left, right)
        return None if equal is None else negated(equal)
    if isinstance(left, Choice) or isinstance(right, Choice):
        return _compared_choice(name, left, right)
    if any(isinstance(x, Absolute) and x.sign < 0 for x in (left, right)):
        return None
    if name != "eq" and isinstance(left, Absolute) and isinstance(right, Linear):
        bound = right - integer(1) if name == "lt" else right
        return both(at_most_zero(left.of - bound), at_most_zero(left.of.times(-1) - bound))
    if name != "eq" and isinstance(right, Absolute) and isinstance(left, Linear):
        within = compared("le" if name == "lt" else "lt", right, left)
        return None if within is None else negated(within)
    if not (isinstance(left, Linear) and isinstance(right, Linear)):
        return None
    difference = left - right
    if name == "eq":
        return is_zero(difference)
    return at_most_zero(difference + integer(1) if name == "lt" else difference)


_ON_NUMBERS: dict[str, Callable[[float, float], bool]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b,
}


def _compared_choice(name: str, left: Number, right: Number) -> Condition | None:
    """Return the condition of a comparison of a choice with a number."""
    choice = left if isinstance(left, Choice) else right
    results = []
    for branch in (True, False):
        values = [_on_branch(x, choice, branch) for x in (left, right)]
        if values[0] is None or values[1] is None:
            return None
        results.append(_ON_NUMBERS[name](values[0], values[1]))
    if results[0] == results[1]:
        return ALWAYS if results[0] else NEVER
    assert isinstance(choice, Choice)
    return choice.condition if results[0] else negated(choice.condition)


def _on_branch(value: Number, choice: Number, branch: bool) -> float | None:
    if value is choice and isinstance(value, Choice):
        return value.if_true if branch else value.if_false
    return as_float(value)


def as_float(value: Value) -> float | None:
    """Return the value of a constant."""
    if isinstance(value, Linear) and value.is_constant:
        return float(value.constant)
    return value if isinstance(value, float) else None


def chosen(condition: Condition, if_true: Value, if_false: Value) -> Value | None:
    """Return the formula of `where(condition, if_true, if_false)`."""
    conditions = (Both, Either, AtMostZero, Zero, Flag, Not)
    if isinstance(if_true, conditions) and isinstance(if_false, conditions):
        return either(both(condition, if_true), both(negated(condition), if_false))
    pair = [x if isinstance(x, Choice) else as_float(x) for x in (if_true, if_false)]
    first, second = pair
    if isinstance(first, float) and isinstance(second, float):
        return Choice(condition, first, second)
    # One side has two numbers, of which the other side is one: two numbers remain.
    if isinstance(first, Choice) and isinstance(second, float):
        if first.if_false == second:
            return Choice(both(condition, first.condition), first.if_true, second)
        if first.if_true == second:
            return Choice(both(condition, negated(first.condition)), first.if_false, second)
    if isinstance(second, Choice) and isinstance(first, float):
        return chosen(negated(condition), second, first)
    return None
