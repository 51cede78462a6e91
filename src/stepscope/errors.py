"""Failures that a user can act on: one line that names the thing, one that names the mend."""

from __future__ import annotations

import difflib
import json
import os
import traceback
from collections.abc import Iterable
from pathlib import Path

_NEAR = 0.65
"""How alike two words are, of 1, where one may be a slip for the other."""


class StepscopeError(Exception):
    """A failure of the work itself. The command line prints it as one line and exits with 1."""

    exit_code = 1

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(f"{message} ({mend})" if mend else message)


class UsageError(StepscopeError):
    """A request that cannot be meant. The command line exits with 2."""

    exit_code = 2


def printable(text: str) -> str:
    """Text for a terminal: every character that could move the cursor, change a colour or reorder
    the line is replaced by its JSON escape; line breaks stay."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1]
        for letter in text
    )


def in_one_line(text: object) -> str:
    """Foreign text, such as a decoder's error that quotes its input, as part of a message."""
    return printable(str(text)).replace("\n", "\\n")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is in no table, with the nearest known one."""
    choices = list(known)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=_NEAR)
    guess = f"perhaps you meant {near[0]}; " if near else ""
    return UsageError(f"{kind} {name!r} does not exist", f"{guess}one of: {', '.join(choices)}")


def no_such_file(path: str | os.PathLike[str], kind: str = "file", mend: str = "") -> UsageError:
    """The error for a file that is not there, with the nearest name in its folder."""
    meant = Path(path)
    if meant.is_dir():
        return UsageError(f"{meant} is a folder", mend or "name a file in it")
    try:
        beside = [entry.name for entry in meant.parent.iterdir() if entry.is_file()]
    except OSError:
        return UsageError(
            f"there is no {kind} {meant}", f"there is no folder {meant.parent}; check its name"
        )
    near = difflib.get_close_matches(meant.name, beside, n=1, cutoff=_NEAR)
    guess = f"perhaps you meant {meant.with_name(near[0])}" if near else "check its name"
    return UsageError(f"there is no {kind} {meant}", "; ".join(filter(None, (guess, mend))))


def first_cause(error: BaseException) -> str:
    """In one line; what a capture's end says only repeats that something failed before."""
    while error.__context__ is not None:
        error = error.__context__
    return one_line(error)


def one_line(error: BaseException) -> str:
    """The class of an exception and the first line of its message, or where it was raised if it
    has no message."""
    kind = type(error).__name__
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:
        # An exception class of the program may fail to format itself.
        lines = []
    if lines:
        return f"{kind}: {lines[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{kind} at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else kind
