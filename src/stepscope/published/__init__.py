"""Published measurements as data: each number with its source, conditions and unit.

There is one file per write-up. A table names its columns: first `keys`, which are conditions of a
row, then quantities; `X ±` is the spread of X. Conditions that a write-up does not state are listed
in `unstated`; those that follow from the assignment it answers are filled in and listed in
`assumed`. A number that is known to be wrong, or to mean something else, has a `doubt`.
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
"""Base unit (ms or B) of each unit, and the factor to it."""


class Doubt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reason why some numbers of a table are not reliable as published."""

    text: str
    where: dict[str, Any] = {}
    """Conditions of those numbers; empty: all of the table."""


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
    """Device, if it is not the device of the write-up."""
    note: str = ""
    doubt: tuple[Doubt, ...] = ()


class WriteUp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One write-up: the content of one file."""

    writeup: str
    device: str
    table: tuple[PublishedTable, ...]
    rates_of: str = ""
    """Device whose data sheet gives the rates, if this device has none here."""
    rates_note: str = ""
    rates: dict[str, float] = {}
    """Ceilings measured on that device, by name, in FLOP/s or B/s."""
    runs: tuple[str, ...] = ()
    """Stepscope runs that the numbers come from, if they were measured with Stepscope."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One published number."""

    writeup: str
    table: str
    device: str
    """Empty if the write-up does not name it."""
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
        """The value in milliseconds or bytes."""
        return self.value * UNITS[self.unit][1]

    @property
    def base_unit(self) -> str:
        return UNITS[self.unit][0]


@cache
def write_ups() -> tuple[WriteUp, ...]:
    """Read all write-ups."""
    loaded = []
    files = resources.files(__name__).iterdir()
    for file in sorted(files, key=lambda file: file.name):
        if file.name.endswith(".toml"):
            raw = tomllib.loads(file.read_text(encoding="utf-8"))
            loaded.append(msgspec.convert(raw, WriteUp))
    return tuple(loaded)


@cache
def figures(study: str | None = None) -> tuple[Figure, ...]:
    """Return every published number, or those of one study."""
    return tuple(
        figure
        for write_up in write_ups()
        for table in write_up.table
        if study in (None, table.study)
        for figure in _figures(write_up, table)
    )


def _figures(write_up: WriteUp, table: PublishedTable) -> Iterator[Figure]:
    for row in table.rows:
        conditions = table.conditions | dict(zip(table.keys, row, strict=False))
        numbers = dict(zip(table.columns, row[len(table.keys) :], strict=True))
        for quantity, value in numbers.items():
            # A number that was not published is written as nan.
            if quantity.endswith(_SPREAD) or math.isnan(float(value)):
                continue
            spread = numbers.get(quantity + _SPREAD)
            device = write_up.device if table.device is None else table.device
            same_device = device == write_up.device
            yield Figure(
                writeup=write_up.writeup,
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
                rates=write_up.rates if same_device else {},
                rates_of=(write_up.rates_of or device) if same_device else device,
                runs=write_up.runs,
            )


def _doubt(table: PublishedTable, conditions: Mapping[str, Any]) -> str:
    texts = [doubt.text for doubt in table.doubt if doubt.where.items() <= conditions.items()]
    return "; ".join(texts)
