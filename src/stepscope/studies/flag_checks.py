"""Checks of flags that several studies share; an error names the invalid value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepscope.errors import UsageError


def check_each(
    name: str, values: Sequence[float], valid: Callable[[float], bool], hint: str
) -> None:
    """Require at least one value, all of them valid."""
    if not values:
        raise UsageError(f"{name} has no value", hint)
    for value in values:
        if not valid(value):
            raise UsageError(f"{name} is {value:g}", hint)


def check_count(name: str, count: int, least: int = 1) -> None:
    check_each(name, (count,), lambda value: value >= least, f"it must be at least {least}")


def check_seconds(name: str, seconds: float) -> None:
    check_each(name, (seconds,), lambda value: value >= 0, "it cannot be negative")


def check_ranks(ranks: Sequence[int], batch: int) -> None:
    """Require that each number of ranks divides the batch."""
    for number in ranks:
        if number < 1:
            raise UsageError(f"ranks is {number}", "it must be at least 1")
        if batch < number or batch % number:
            raise UsageError(
                f"a batch of {batch} cannot be divided among {number} ranks",
                "choose a multiple of the ranks",
            )
