"""Valid names in records, which become part of paths, command lines and pages.

A record file or a store may come from an untrusted source, and its run becomes a file name. The
names are checked when a record or a run is constructed, which covers every source: JSON Lines, the
store, an import, a measurement.
"""

from __future__ import annotations

import re

MAX_NAME_LENGTH = 200
"""Maximum length. With a prefix and a suffix it still fits into the 255 bytes of a file name."""
MAX_CASE_LENGTH = 1000
"""Maximum length. A case lists all settings that differ from the default; it never becomes a file
name."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]*")
_CASE = re.compile(r"[A-Za-z0-9._=+-]+")
_NOT_IN_FILE_NAMES = re.compile(r"[^A-Za-z0-9._=+-]+")


def require_name(field: str, text: str) -> None:
    """Raise ValueError unless `text` can identify a run, a study or a record."""
    if len(text) > MAX_NAME_LENGTH or not _NAME.fullmatch(text):
        raise ValueError(
            f"{field} {_quoted(text)} is not a valid name: up to {MAX_NAME_LENGTH} letters, digits"
            " and ._=+-, not starting with a dot or a sign"
        )


def require_case(field: str, text: str) -> None:
    """Raise ValueError unless `text` can identify a case within its study."""
    if len(text) > MAX_CASE_LENGTH or not _CASE.fullmatch(text):
        raise ValueError(
            f"{field} {_quoted(text)} is not a valid name: 1 to {MAX_CASE_LENGTH} letters, digits"
            " and ._=+-"
        )


def file_name(text: str) -> str:
    """Convert `text` to one component of a path: other characters become a dash, and the file is
    never hidden."""
    return _NOT_IN_FILE_NAMES.sub("-", text).lstrip(".-")[:MAX_NAME_LENGTH] or "unnamed"


def _quoted(text: str) -> str:
    shown = text if len(text) <= 60 else f"{text[:60]}…"
    return ascii(shown)
