"""The techniques and the entries of the device card, from `catalog.toml`."""

from __future__ import annotations

from importlib import resources

import msgspec


class Words(msgspec.Struct, frozen=True):
    """Description of a technique on one kind of device."""

    slow: str
    fast: str
    hardware: str


class Technique(msgspec.Struct, frozen=True):
    """An optimization technique and its descriptions."""

    title: str
    gpu: Words
    cpu: Words
    cause: str
    """The part of a step's waterfall that the technique shortens."""
    example: str
    """Parts of a training step to which it applies."""
    cached: bool = False
    """True if most loads hit caches, for whose bandwidth there is no measured ceiling."""


class _Catalog(msgspec.Struct):
    techniques: dict[str, Technique]
    card: dict[str, tuple[str, str]]


_CATALOG = msgspec.toml.decode(
    resources.files("stepscope.studies.techniques").joinpath("catalog.toml").read_bytes(),
    type=_Catalog,
)
TECHNIQUES = _CATALOG.techniques
"""Techniques in the order of the tables."""
CARD = _CATALOG.card
"""Entries of the device card: title and meaning for a kernel."""


def words(technique: str, device_kind: str) -> Words:
    """Description of a technique on this kind of device."""
    entry = TECHNIQUES[technique]
    return entry.gpu if device_kind == "cuda" else entry.cpu
