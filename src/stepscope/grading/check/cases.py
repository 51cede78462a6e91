"""Cases of the check: one criterion of an implementation, or its speed. Loads without torch."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

import msgspec

from stepscope.studies.base import Case


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong: a code, a sentence without its subject, and values."""

    code: str
    text: str
    values: dict[str, Any] = {}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one criterion."""

    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
    """What was not graded, and why."""


class Checked(Case, frozen=True, kw_only=True, omit_defaults=True):
    """An implementation: `source` is a file or a module, `name` a class or function in it."""

    source: str
    name: str
    kind: str
    adapters: bool = False
    """`name` is a function of the interface of the course's adapters."""
    seconds: float = 60.0
    """Time limit of one call; on ranks, of one step."""

    @property
    def subject(self) -> str:
        """The file or module and the name, as a part of a case key."""
        stem = PurePath(self.source).stem if self.source.endswith(".py") else self.source
        return re.sub(r"[^A-Za-z0-9.]+", "-", f"{stem}.{self.name}")


class CriterionCase(Checked, frozen=True, kw_only=True, omit_defaults=True, tag="criterion"):
    """One criterion of an implementation."""

    criterion: str

    @property
    def key(self) -> str:
        return f"{self.subject}_{self.criterion}"


class SpeedCase(Checked, frozen=True, kw_only=True, omit_defaults=True, tag="speed"):
    """Its speed, interleaved with that of Stepscope's and of torch's."""

    rounds: int = 20

    @property
    def key(self) -> str:
        return f"{self.subject}_speed"


AnyCase = CriterionCase | SpeedCase
