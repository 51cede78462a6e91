"""Break sentences, names and code into lines of a given width, without losing a letter."""

from __future__ import annotations

import re

_WORDS = re.compile(r"\S+(?:(?<=\d) (?:%|[mµ]?s|(?:[KMGTP]i)?B)(?![\w/])\S*)?")
"""A number and its unit stay on one line."""
_NAME_PARTS = re.compile(r"[^\W_]*[\W_]*")
"""Parts of a name or path, each with the sign after it, behind which a line may end."""


def wrapped(text: str, width: int, first: str = "", later: str = "") -> list[str]:
    """The lines of a text, the first one indented by `first`, the others by `later`. A word that is
    wider than a line continues on the next one, where possible after a sign such as `_` or `/`."""
    lines = [first]
    empty = True
    for word in _WORDS.findall(text):
        room = max(1, width - max(len(first), len(later)))
        for number, part in enumerate(_parts(word, room)):
            joined = lines[-1] + ("" if empty or number else " ") + part
            if len(joined) > width and not empty:
                lines.append(later + part)
            else:
                lines[-1] = joined
            empty = False
    return [line.rstrip() for line in lines] if not empty else []


def wrapped_code(line: str, width: int, indent: str = "") -> list[str]:
    """The lines of a line of Python, which is continued within brackets only; what has none may be
    wider. A comment that does not fit follows with its sign."""
    code = line.lstrip(" ")
    indent += " " * (len(line) - len(code))
    if len(indent) + len(code) <= width:
        return [indent + code]
    code, sign, comment = code.partition("# ")
    lines = [indent]
    for number, part in enumerate(_bracketed(code)):
        if number and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append(f"{indent}    ")
        lines[-1] += part
    written = [text for one in lines if (text := one.rstrip())]
    return [*written, *wrapped(comment, width, indent + sign, indent + sign)]


def _bracketed(code: str) -> list[str]:
    """The parts of a statement between which a line may end."""
    parts, depth = [""], 0
    for letter in code:
        parts[-1] += letter
        depth += (letter in "([{") - (letter in ")]}")
        if depth and letter in "([{ ":
            parts.append("")
    return parts


def _parts(word: str, width: int) -> list[str]:
    """The word itself, or parts of it that fit."""
    if len(word) <= width:
        return [word]
    return [
        part[start : start + width]
        for part in _NAME_PARTS.findall(word)
        for start in range(0, len(part), width)
    ]
