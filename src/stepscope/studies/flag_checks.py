"""What flags of several studies must hold; an error names the value that does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepscope.errors import UsageError


def check_each(
    name: str, values: Sequence[float], meant: Callable[[float], bool], mend: str
) -> None:
    """At least one value, and every one is meant."""
    if not values:
        raise UsageError(f"{name} has no value", mend)
    for value in values:
        if not meant(value):
            raise UsageError(f"{name} is {value:g}", mend)


def check_seconds(name: str, seconds: float) -> None:
    check_each(name, (seconds,), lambda value: value >= 0, "it cannot be negative")


def check_ranks(ranks: Sequence[int], batch: int) -> None:
    """Each number of them has equal shares of the batch."""
    for number in ranks:
        if number < 1:
            raise UsageError(f"ranks is {number}", "it must be at least 1")
        if batch < number or batch % number:
            raise UsageError(
                f"a batch of {batch} cannot be shared out among {number} ranks",
                "choose a multiple of the ranks",
            )
