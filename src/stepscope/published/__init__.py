"""Figures that others and we have published, as data: each with its source, conditions and unit.

One file for each write-up. A table of a file names its columns: `keys` first, which are conditions
of their own, then quantities; `X ±` is the spread of X. What a write-up does not state is named in
`unstated`; what follows from the assignment that it answers is filled in and named in `assumed`. A
figure that is known to be wrong, or to mean something else, has a `doubt`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

import msgspec

_SPREAD = " ±"
UNITS = {
    "ms": ("ms", 1.0),
    "s": ("ms", 1e3),
    "B": ("B", 1.0),
    "MiB": ("B", 2.0**20),
    "GiB": ("B", 2.0**30),
}
"""What each unit is in milliseconds or bytes."""


class Doubt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why some figures of a table cannot be taken as they stand."""

    text: str
    where: dict[str, Any] = {}
    """The conditions of those figures; empty: all of them."""


class PublishedTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of a write-up."""

    name: str
    study: str
    unit: str
    statistic: str
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float | bool, ...], ...]
    conditions: dict[str, Any] = {}
    unstated: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    device: str | None = None
    """Where it is another one than the write-up's."""
    note: str = ""
    doubt: tuple[Doubt, ...] = ()


class WriteUp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file."""

    writeup: str
    device: str
    table: tuple[PublishedTable, ...]
    rates_of: str = ""
    """Whose data sheet gives the device's rates, where it has none of its own here."""
    rates_note: str = ""
    rates: dict[str, float] = {}
    """Measured on that device: ceilings by name, in FLOP/s or B/s."""
    runs: tuple[str, ...] = ()
    """Of our own: the runs whose records these are."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One published number."""

    writeup: str
    table: str
    device: str
    """Empty where the write-up does not name it."""
    study: str
    conditions: dict[str, Any]
    quantity: str
    value: float
    unit: str
    statistic: str
    spread: float | None
    unstated: tuple[str, ...]
    assumed: tuple[str, ...]
    note: str
    doubt: str
    rates: dict[str, float]
    rates_of: str
    runs: tuple[str, ...]

    @property
    def base(self) -> float:
        """In milliseconds or bytes."""
        return self.value * UNITS[self.unit][1]

    @property
    def base_unit(self) -> str:
        return UNITS[self.unit][0]


@cache
def write_ups() -> tuple[WriteUp, ...]:
    found = []
    files = resources.files(__name__).iterdir()
    for file in sorted(files, key=lambda file: file.name):
        if file.name.endswith(".toml"):
            raw = tomllib.loads(file.read_text(encoding="utf-8"))
            found.append(msgspec.convert(raw, WriteUp))
    return tuple(found)


@cache
def figures(study: str | None = None) -> tuple[Figure, ...]:
    """Every published number, or those that a study would measure."""
    return tuple(
        figure
        for held in write_ups()
        for table in held.table
        if study in (None, table.study)
        for figure in _figures(held, table)
    )


def _figures(held: WriteUp, table: PublishedTable) -> Iterator[Figure]:
    for row in table.rows:
        conditions = table.conditions | dict(zip(table.keys, row, strict=False))
        numbers = dict(zip(table.columns, row[len(table.keys) :], strict=True))
        for quantity, value in numbers.items():
            # A number that was not published is written as nan.
            if quantity.endswith(_SPREAD) or math.isnan(float(value)):
                continue
            spread = numbers.get(quantity + _SPREAD)
            device = held.device if table.device is None else table.device
            own = device == held.device
            yield Figure(
                writeup=held.writeup,
                table=table.name,
                device=device,
                study=table.study,
                conditions=conditions,
                quantity=quantity,
                value=float(value),
                unit=table.unit,
                statistic=table.statistic,
                spread=None if spread is None else float(spread),
                unstated=table.unstated,
                assumed=table.assumed,
                note=table.note,
                doubt=_doubt(table, conditions),
                rates=held.rates if own else {},
                rates_of=(held.rates_of or device) if own else device,
                runs=held.runs,
            )


def _doubt(table: PublishedTable, conditions: Mapping[str, Any]) -> str:
    said = [doubt.text for doubt in table.doubt if doubt.where.items() <= conditions.items()]
    return "; ".join(said)
