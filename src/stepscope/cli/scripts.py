"""A script among the words of a command: our options before it, its own after it."""

from __future__ import annotations

import typing
from collections.abc import Sequence


def split_words(
    words: Sequence[str], options: type
) -> tuple[list[str], str | None, list[str]]:  # fmt: skip
    """Our own options, the script, and all that belongs to the script."""
    kinds = typing.get_type_hints(options)
    place = 0
    own: list[str] = []
    while place < len(words) and words[place].startswith("-"):
        word = words[place]
        if word == "--":
            place += 1
            break
        own.append("--module" if word == "-m" else word)
        name = word.lstrip("-").replace("-", "_")
        if "=" not in word and kinds.get(name) not in (None, bool):
            own += words[place + 1 : place + 2]
            place += 1
        place += 1
    if place >= len(words):
        return own, None, []
    return own, words[place], list(words[place + 1 :])
