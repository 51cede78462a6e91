"""Source positions of what a training script does, as observed while it ran. Does not need torch.

A position is that of the bytecode instruction that was executing: it names one call in the source,
whatever the script's variables are called.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

SITES = "sites.json"
"""File that the observer writes."""


class Place(msgspec.Struct, frozen=True):
    """The call that a function of the user was executing."""

    file: str
    function: str
    first_line: int
    """First line of the function; equal for the frames of one function."""
    line: int
    end_line: int
    column: int
    end_column: int
    """In UTF-8 bytes, as in `ast`."""

    def same_function(self, other: Place) -> bool:
        return (self.file, self.first_line) == (other.file, other.first_line)


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """One observed call: functions of the user on the stack, outermost first."""

    kind: str
    stack: tuple[Place, ...]
    direct: bool = True
    """Whether the user's code itself makes the call, and not a library that it calls."""
    about: dict[str, str] = {}
    models: tuple[dict[str, str], ...] = ()
    """For each place of the stack: expressions there that are a trained model, by its number."""
    batches: tuple[tuple[str, ...], ...] = ()
    """For each place of the stack of a call of a model: variables there that are tensors."""

    @property
    def place(self) -> Place | None:
        return self.stack[-1] if self.stack else None


class Sites(msgspec.Struct, frozen=True, kw_only=True):
    """What was observed in a few steps."""

    sites: tuple[Site, ...] = ()
    device: str = "cpu"
    steps: int = 0
    blocks: str = ""
    """Path of the model's list of repeated blocks."""

    def of(self, kind: str) -> list[Site]:
        return [one for one in self.sites if one.kind == kind]

    def first(self, kind: str) -> Site | None:
        return next(iter(self.of(kind)), None)


class ByHand(NamedTuple):
    """An edit that is left to the user."""

    where: str
    """File and line; empty if the place is not known."""
    what: str
    why: str


def where(site: Site | None) -> str:
    place = None if site is None else site.place
    return "" if place is None else f"{place.file}:{place.line}"
