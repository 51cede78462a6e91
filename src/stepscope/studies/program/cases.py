"""What a record of `inspect` says of the program that was watched."""

from __future__ import annotations

import msgspec

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

    @property
    def key(self) -> str:
        stem = file_safe(self.script)
        return f"{stem}.rank{self.rank}" if self.ranks > 1 else stem


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True):
    """What the config of a record says of its step, whichever study recorded it. What a watched
    program sets up itself is in the attachment `setting`."""

    script: str = ""
    model: str = ""
    rank: int = 0
    ranks: int = 1
    dtype: str = ""
    compile: str = "no"
    optimizer: str = ""
    batch: int | None = None

    @property
    def program(self) -> str:
        """The script, or the function that builds the model."""
        return self.script or self.model
