"""Failures that a user can act on: one line that names the thing, one that names the mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StepscopeError(Exception):
    """A failure of the work itself. The command line prints it as one line and exits with 1."""

    exit_code = 1

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(f"{message} ({mend})" if mend else message)


class UsageError(StepscopeError):
    """A request that cannot be meant. The command line exits with 2."""

    exit_code = 2


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is in no table, with the nearest known one."""
    choices = list(known)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    guess = f"perhaps you meant {near[0]}; " if near else ""
    return UsageError(f"{kind} {name!r} does not exist", f"{guess}one of: {', '.join(choices)}")
