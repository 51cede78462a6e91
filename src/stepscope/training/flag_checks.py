"""Checks of flags that several studies share; an error names the invalid value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from stepscope.errors import UsageError, unknown_name


def check_each(
    name: str, values: Sequence[float], valid: Callable[[float], bool], hint: str
) -> None:
    """Require at least one value, all of them valid."""
    if not values:
        raise UsageError(f"{name} has no value", hint)
    for value in values:
        if not valid(value):
            raise UsageError(f"{name} is {value:g}", hint)


def check_at_least(least: int, **values: float) -> None:
    """Require a minimum of each named value."""
    for name, value in values.items():
        check_each(name, (value,), lambda v: v >= least, f"it must be at least {least}")


def check_known(kind: str, values: Iterable[str], known: Collection[str]) -> None:
    """Require that each value is one of the known names."""
    for value in values:
        if value not in known:
            raise unknown_name(kind, value, known)


def check_seconds(name: str, seconds: float) -> None:
    check_each(name, (seconds,), lambda value: value >= 0, "it cannot be negative")


def check_ranks(ranks: Sequence[int], batch: int) -> None:
    """Require that each number of ranks divides the batch."""
    for count in ranks:
        check_at_least(1, ranks=count)
        if batch < count or batch % count:
            raise UsageError(
                f"a batch of {batch} cannot be divided among {count} ranks",
                "choose a multiple of the ranks",
            )
