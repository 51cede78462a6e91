"""Errors of the command line in one line; tyro prints them in a box of several."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from stepscope.errors import UsageError

_SIDES = re.compile(r"^[│|] ?| *[│|]$")
_RULE = re.compile(r"[─-]+")
_PARSED = re.compile(r"Error parsing (?P<flag>.+?): (?P<reason>.*)")
_CHOICE = re.compile(
    r"invalid choice (?P<value>.+) for argument '(?P<flag>.+?)'\..*\((?P<known>.*)\)"
)
_UNKNOWN = re.compile(r"Unrecognized options: (?P<words>.*)")
_NO_VALUE = re.compile(r"Missing value for argument '(?P<flag>.+?)'")
_MISSING = re.compile(r"Missing from .*?: (?P<flag>\S+)")
_QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
_FLAG = re.compile(r"--[a-z]\S*")


@contextmanager
def errors_in_one_line(command: str) -> Iterator[None]:
    """Raise the error that tyro prints inside as a `UsageError`."""
    captured = io.StringIO()
    try:
        with redirect_stderr(captured):
            yield
    except SystemExit as end:
        if end.code != UsageError.exit_code:
            raise
        message, fix = _explained(captured.getvalue())
        help_ = f"see `stepscope {command} --help`"
        raise UsageError(message, "; ".join(filter(None, (fix, help_)))) from None
    sys.stderr.write(captured.getvalue())


def _explained(box: str) -> tuple[str, str]:
    """What is wrong, and what to give instead, from the text of a box: an error, then the flags
    that it is about."""
    parts: list[list[str]] = [[]]
    for line in box.splitlines()[1:-1]:
        text = _SIDES.sub("", line).strip()
        if _RULE.fullmatch(text):
            parts.append([])
        else:
            parts[-1].append(text)
    parts = [part for part in parts if part]
    error, flags = " ".join(parts[0]), [line for part in parts[1:-1] for line in part]
    if found := _PARSED.match(error):
        given = _QUOTED.findall(found["reason"])
        takes = next((line for line in flags if line.startswith(found["flag"])), "")
        takes = takes.removeprefix(found["flag"]).strip()
        if not given or " is not " in found["reason"]:
            return f"{found['flag']}: {found['reason']}", ""
        return f"{found['flag']} is {given[-1]}", f"it takes {takes}" if takes else ""
    if found := _CHOICE.match(error):
        known = found["known"].replace("'", "")
        return f"{found['flag']} is {found['value']}", f"one of: {known}"
    if found := _UNKNOWN.match(error):
        near = [flag[0] for line in flags if (flag := _FLAG.match(line))]
        guess = f"perhaps you meant {near[0]}" if near else ""
        return f"{found['words'].replace(', ', ' ')} is not an option", guess
    if found := _NO_VALUE.match(error):
        return f"{found['flag']} has no value", ""
    if found := _MISSING.match(error):
        return f"{found['flag']} is missing", ""
    return error, ""
