"""A problem of the assignment as data: its questions, and what of which study answers them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Edition = Literal["2025", "2026"]
EDITIONS: tuple[Edition, ...] = ("2025", "2026")
Flags = Mapping[str, Any]
Filter = Mapping[str, tuple[Any, ...]]
"""Allowed values by name of a field of a record's `config`."""


class Show(msgspec.Struct, frozen=True):
    """What the records of a need contribute to an answer."""

    need: str
    """Name in `needs.NEEDS`."""
    findings: tuple[str, ...] = ()
    """Codes of the findings that answer the question, in the order of the document."""
    blocks: tuple[str, ...] = ()
    """Beginnings of the names of tables and figures."""
    only: Filter = {}
    """Restricts the records before the view sees them, so that its findings are about these."""
    committed: Filter | None = {}
    """The same for the committed records, in addition to `only`; None shows none of them."""
    among: Mapping[str, Any] = {}
    """Values that a finding must have, where several findings have its code."""
    strategies: tuple[str, ...] = ()
    """Of a study on several ranks: strategies to compare with the first in a sentence."""


class Part(msgspec.Struct, frozen=True):
    """A sub-question, in our own words."""

    question: str
    shows: tuple[Show, ...] = ()
    label: str = ""
    """Letter of the sub-question; empty for a problem with one question."""
    editions: tuple[Edition, ...] = EDITIONS
    code: str = ""
    """The implementation that a programming problem asks for: where to find it here."""
    calculation: str = ""
    """Letters or words of the parts of the calculation of the problem's name."""
    command: str = ""
    """A command besides those that measure the needs."""


class Problem(msgspec.Struct, frozen=True):
    """A problem by its name in the handout."""

    name: str
    title: str
    parts: tuple[Part, ...]
    editions: tuple[Edition, ...] = EDITIONS
    sections: tuple[Edition, ...] = ()
    """Editions that have it as a section of the text, without a problem of this name."""

    def parts_of(self, edition: Edition) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if edition in part.editions)

    @property
    def in_documents_of(self) -> tuple[Edition, ...]:
        return tuple(one for one in EDITIONS if one in self.editions + self.sections)
