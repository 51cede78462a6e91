"""Validation of the configuration of a record's case, once, when the record is read.

A setting has the same type in every study, so one table covers all studies, and their pages can
rely on it. Settings that are not in the table are not checked.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from stepscope.errors import StepscopeError, in_one_line

_MAX_DEPTH = 32
"""Maximum levels of nesting; the studies record less than 10."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
_PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=10**15)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=10**6)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=10**6)]
_Number = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
_Signed = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
_SETTINGS: tuple[tuple[Any, str], ...] = (
    (bool, "autotune_gemms causal fused fused_projections graph"),
    (
        str,
        "accumulator activation_policy attention backend checkpoint collective compile compile_mode"
        " compute dtype format how kind loss mode model optimizer own part pass race rung script"
        " size snapshot subject table technique terms",
    ),
    (
        _Count,
        "back_to_back budget_bytes context count loss_steps mib rounds rows samples steps timed"
        " traced warmup warps",
    ),
    (_PositiveInt, "head heads seq"),
    (_PositiveInt | None, "batch"),
    (_Number, "min_seconds"),
    (_Positive, "term"),
    (_Positive | None, "step_ms"),
    (_Signed | None, "together_ms"),
    (_Rank, "rank"),
    (_Ranks | list[_Ranks], "ranks"),
    (list[str], "arguments link"),
    (list[_Number], "bucket_mb"),
    (list[_Count], "length sizes"),
    (list[Any], "racers"),
    (dict[str, Any], "overrides"),
)
"""Type and range of the settings of all studies."""
# Field names end with an underscore, because `pass` is a keyword of Python.
_Settings = msgspec.defstruct(
    "Settings",
    [(f"{name}_", kind | UnsetType, UNSET) for kind, names in _SETTINGS for name in names.split()],
    rename=lambda name: name.removesuffix("_"),
)


class Named(dict[str, Any]):
    """Settings or notes of a record; a missing key raises an error that names the record."""

    __slots__ = ("_part", "_record")

    def __init__(self, entries: dict[str, Any], part: str, record: str) -> None:
        super().__init__(entries)
        self._part, self._record = part, record

    def __missing__(self, key: str) -> Any:
        raise StepscopeError(
            f"the {self._part} of record {self._record} has no {key!r}",
            "was it written by another version of Stepscope?",
        )


def check_depth(value: dict[str, Any], part: str) -> None:
    """Raise StepscopeError if `value` is nested too deeply to be traversed and encoded again."""
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise StepscopeError(f"not a record: its {part} is nested more than {_MAX_DEPTH} levels deep")


def check_config(config: dict[str, Any]) -> None:
    """Raise StepscopeError for settings of the wrong type or range."""
    _check_numbers(config)
    try:
        msgspec.convert(config, _Settings)
    except msgspec.ValidationError as error:
        raise StepscopeError(f"not a record: in its config: {in_one_line(error)}") from error


def _check_numbers(value: dict[str, Any] | list[Any]) -> None:
    for part in value.values() if isinstance(value, dict) else value:
        kind = type(part)
        if kind is int:
            if abs(part) >= 2**63:
                raise StepscopeError("not a record: a number of its config has more than 64 bits")
        elif kind is dict or kind is list:
            _check_numbers(part)
