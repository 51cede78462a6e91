"""Split a command line at a script: Stepscope's options precede it, its own follow it."""

from __future__ import annotations

import typing
from collections.abc import Sequence


def split_words(words: Sequence[str], options: type) -> tuple[list[str], str | None, list[str]]:
    """Return Stepscope's options, the script (if any), and the script's arguments."""
    types = typing.get_type_hints(options)
    index = 0
    own: list[str] = []
    while index < len(words) and words[index].startswith("-"):
        word = words[index]
        if word == "--":
            index += 1
            break
        own.append("--module" if word == "-m" else word)
        name = word.lstrip("-").replace("-", "_")
        if "=" not in word and types.get(name) not in (None, bool):
            own += words[index + 1 : index + 2]
            index += 1
        index += 1
    if index >= len(words):
        return own, None, []
    return own, words[index], list(words[index + 1 :])


def misplaced_options(arguments: Sequence[str], options: type) -> str:
    """Return what to do about arguments of a script that are named like options of Stepscope."""
    own = {f"--{name.replace('_', '-')}" for name in typing.get_type_hints(options)}
    found = [word for word in arguments if word.partition("=")[0] in own]
    return f"Stepscope's options go before the script: {', '.join(found)}" if found else ""
