"""Output in the character set of the locale: what it lacks is written in ASCII."""

from __future__ import annotations

import codecs
import json
import os
import unicodedata
from typing import TextIO

_ERRORS = "stepscope"
_ASCII = {
    "█": "#", "▓": "%", "▚": "x", "▒": "+", "░": "-", "·": ".", "▞": "o",
    "╬": "&", "═": "=", "┼": "^", "┄": "~",
    "▁": "_", "▂": ".", "▃": "-", "▄": "=", "▅": "o", "▆": "O", "▇": "0", "─": "-",
    "●": "*", "•": "*", "✓": "+", "▲": "!", "−": "-", "–": "-", "—": "-", "×": "x", "…": "...",
    "→": "->", "±": "+-", "≤": "<=", "≥": ">=", "≈": "~", "µ": "u", "μ": "u", "²": "2", "³": "3",
    "∞": "inf", "α": "alpha", "β": "beta", "√": "sqrt", "∘": "o", "∗": "*", "⇔": "<=>", "′": "'",
    "“": '"', "”": '"', "’": "'", "‘": "'",
    "❌": "FAILED:", "✅": "OK:", "\N{WARNING SIGN}": "?",
}  # fmt: skip
"""The characters of our own texts; of those of a user, such as a file name, the code is written."""
_WIDE = "±≤≥"
"""Written as two characters, in place of a space after them, so that columns stay aligned."""


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    written, at = [], error.start
    while at < error.end:
        letter = error.object[at]
        written.append(_ASCII.get(letter) or _plain(letter))
        at += 1
        if letter in _WIDE and error.object[at : at + 1] == " ":
            at += 1
    return "".join(written), at


def _plain(letter: str) -> str:
    """The letter that a superscript or subscript is of; otherwise the code of a character."""
    kind, _, code = unicodedata.decomposition(letter).partition(" ")
    if kind in ("<super>", "<sub>") and int(code, 16) < 128:
        return chr(int(code, 16))
    return json.dumps(letter)[1:-1]


codecs.register_error(_ERRORS, _in_ascii)


def use_locale(stream: TextIO) -> None:
    """Write what the encoding of a stream lacks in ASCII. Python takes `LC_ALL=C` as UTF-8, which
    such a terminal does not show."""
    if not hasattr(stream, "reconfigure"):
        return
    asked = os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8")
    plain = os.environ.get("LC_ALL") in ("C", "POSIX") and not asked
    stream.reconfigure(encoding="ascii" if plain else None, errors=_ERRORS)
