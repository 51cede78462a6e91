"""What a record of `inspect` says of the program that was watched."""

from __future__ import annotations

from typing import ClassVar

from stepscope.studies.base import Case

STUDY_NAME = "inspect"


def file_safe(name: str) -> str:
    """A program's name as part of a case's key."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)


class InspectedCase(Case, frozen=True, kw_only=True):
    """One process of a program: a rank, or all there is."""

    script: str
    arguments: tuple[str, ...]
    rank: int
    ranks: int
    dtype: str
    """Of most of its FLOPs."""
    warmup: int
    timed: int
    traced: int

    # What a program sets up itself is in the attachment `setting`.
    batch: ClassVar[None] = None
    compile: ClassVar[str] = "no"
    optimizer: ClassVar[str] = ""

    @property
    def key(self) -> str:
        stem = file_safe(self.script)
        return f"{stem}.rank{self.rank}" if self.ranks > 1 else stem

    @property
    def program(self) -> str:
        return self.script
