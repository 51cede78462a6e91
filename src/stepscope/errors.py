"""Errors that a user can act on: a message that names the cause, and how to fix it."""

from __future__ import annotations

import difflib
import json
import os
import re
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

_NOT_ASCII_TEXT = re.compile(r"[^ -~\n]+")
_NEAR = 0.65
"""Similarity ratio, from 0 to 1, from which one word is suggested as a correction of another."""

_MEMORY_MESSAGES = (
    "can't allocate memory",
    "out of memory",
    "outofmemoryerror",
    "not enough memory",
    "alloc_failed",
)


class StepscopeError(Exception):
    """A failure at run time. The command line prints it as one line and exits with 1."""

    exit_code = 1

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(f"{message} ({fix})" if fix else message)


class UsageError(StepscopeError):
    """An invalid request. The command line exits with 2."""

    exit_code = 2


def tells_of_memory(text: str) -> bool:
    """Return True if the text of an error says that memory ran out."""
    lower = text.lower()
    return any(words in lower for words in _MEMORY_MESSAGES)


def printable(text: str) -> str:
    """Escape text for a terminal: every character that could move the cursor, change a color or
    reorder the line is replaced by its JSON escape; line breaks stay."""
    # Almost all text, and far faster than a regular expression.
    if text.replace("\n", "").isprintable():
        return text
    return _NOT_ASCII_TEXT.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    run = found[0]
    if run.isprintable():
        return run
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in run)


def in_one_line(text: object) -> str:
    """Escape untrusted text, such as a decoder's error that quotes its input, for a message."""
    return printable(str(text)).replace("\n", "\\n")


def some(names: Sequence[str], most: int = 3) -> str:
    """List the first names, and the number of further ones."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Create the error for an unknown name, with the nearest known name as a suggestion."""
    choices = list(known)
    guess = guessed(name, choices)
    listed = f"one of: {', '.join(choices)}"
    return UsageError(f"{kind} {name!r} does not exist", "; ".join(filter(None, (guess, listed))))


def guessed(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that is nearest to an unknown one; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=_NEAR)
    return f"perhaps you meant {near[0]}" if near else ""


def no_such_file(path: str | os.PathLike[str], kind: str = "file", fix: str = "") -> UsageError:
    """Create the error for a missing file, with the nearest name in its folder as a suggestion."""
    requested = Path(path)
    if requested.is_dir():
        return UsageError(f"{requested} is a folder", fix or "name a file in it")
    try:
        siblings = [entry.name for entry in requested.parent.iterdir() if entry.is_file()]
    except OSError:
        return UsageError(
            f"there is no {kind} {requested}",
            f"there is no folder {requested.parent}; check its name",
        )
    near = difflib.get_close_matches(requested.name, siblings, n=1, cutoff=_NEAR)
    guess = f"perhaps you meant {requested.with_name(near[0])}" if near else "check its name"
    return UsageError(f"there is no {kind} {requested}", "; ".join(filter(None, (guess, fix))))


def first_cause(error: BaseException) -> str:
    """Return the root cause of an exception in one line. The error at the end of a CUDA graph
    capture only repeats that an earlier operation failed."""
    while error.__context__ is not None:
        error = error.__context__
    return one_line(error)


def one_line(error: BaseException) -> str:
    """Return the class of an exception and the first line of its message, or the file and line that
    raised it if it has no message."""
    kind = type(error).__name__
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:
        # The __str__ of a user's exception class may raise.
        lines = []
    if lines:
        return f"{kind}: {lines[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{kind} at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else kind
