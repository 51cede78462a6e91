"""Config of a record of `inspect`."""

from __future__ import annotations

import msgspec

from stepscope.training.case import Case

STUDY_NAME = "inspect"


def file_safe(name: str) -> str:
    """Return a program's name with only characters that are valid in a case key."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)


class InspectedCase(Case, frozen=True, kw_only=True):
    """One process of a program: a rank, or the only process."""

    script: str
    arguments: tuple[str, ...]
    rank: int
    ranks: int
    dtype: str
    """Dtype of most of its FLOPs."""
    warmup: int
    timed: int
    traced: int

    @property
    def key(self) -> str:
        stem = file_safe(self.script)
        return f"{stem}.rank{self.rank}" if self.ranks > 1 else stem


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True):
    """Config fields of a recorded step, common to all studies that record one. The setup of an
    observed program is in the attachment `setting`."""

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
        """Name of the script, or of the function that builds the model."""
        return self.script or self.model
