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

Counted = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
OptionalCount = Counted | UnsetType
OptionalPositiveInt = Annotated[int, msgspec.Meta(ge=1, le=10**15)] | UnsetType
Rank = Annotated[int, msgspec.Meta(ge=0, lt=10**6)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=10**6)]
Positive = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
OptionalNumber = Positive | UnsetType
OptionalText = str | UnsetType
OptionalFlag = bool | UnsetType


class Settings(msgspec.Struct, frozen=True, kw_only=True, rename={"pass_": "pass"}):
    """All settings of the studies, with type and range."""

    accumulator: OptionalText = UNSET
    arguments: list[str] | UnsetType = UNSET
    attention: OptionalText = UNSET
    back_to_back: OptionalCount = UNSET
    backend: OptionalText = UNSET
    batch: OptionalPositiveInt | None = UNSET
    bucket_mb: list[Positive] | UnsetType = UNSET
    budget_bytes: OptionalCount = UNSET
    causal: OptionalFlag = UNSET
    checkpoint: OptionalText = UNSET
    collective: OptionalText = UNSET
    compile: OptionalText = UNSET
    compile_mode: OptionalText = UNSET
    compute: OptionalText = UNSET
    context: OptionalCount = UNSET
    count: OptionalCount = UNSET
    dtype: OptionalText = UNSET
    format: OptionalText = UNSET
    fused: OptionalFlag = UNSET
    graph: OptionalFlag = UNSET
    head: OptionalPositiveInt = UNSET
    heads: OptionalPositiveInt = UNSET
    how: OptionalText = UNSET
    fused_projections: OptionalFlag = UNSET
    activation_policy: OptionalText = UNSET
    kind: OptionalText = UNSET
    length: list[Counted] | UnsetType = UNSET
    technique: OptionalText = UNSET
    link: list[str] | UnsetType = UNSET
    loss: OptionalText = UNSET
    loss_steps: OptionalCount = UNSET
    mib: OptionalCount = UNSET
    min_seconds: OptionalNumber = UNSET
    mode: OptionalText = UNSET
    model: OptionalText = UNSET
    optimizer: OptionalText = UNSET
    overrides: dict[str, Any] | UnsetType = UNSET
    own: OptionalText = UNSET
    part: OptionalText = UNSET
    pass_: OptionalText = UNSET
    race: OptionalText = UNSET
    racers: list[Any] | UnsetType = UNSET
    rank: Rank | UnsetType = UNSET
    ranks: Ranks | list[Ranks] | UnsetType = UNSET
    rounds: OptionalCount = UNSET
    rows: OptionalCount = UNSET
    rung: OptionalText = UNSET
    samples: OptionalCount = UNSET
    script: OptionalText = UNSET
    autotune_gemms: OptionalFlag = UNSET
    seq: OptionalPositiveInt = UNSET
    size: OptionalText = UNSET
    sizes: list[Counted] | UnsetType = UNSET
    snapshot: OptionalText = UNSET
    step_ms: Annotated[float, msgspec.Meta(gt=0, le=1e15)] | UnsetType | None = UNSET
    steps: OptionalCount = UNSET
    subject: OptionalText = UNSET
    table: OptionalText = UNSET
    term: Annotated[float, msgspec.Meta(gt=0, le=1e15)] | UnsetType = UNSET
    terms: OptionalText = UNSET
    timed: OptionalCount = UNSET
    together_ms: Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)] | UnsetType | None = UNSET
    traced: OptionalCount = UNSET
    warmup: OptionalCount = UNSET
    warps: OptionalCount = UNSET


class Named(dict[str, Any]):
    """Settings or notes of a record; a missing key raises an error that names the record."""

    def __init__(self, entries: dict[str, Any], where: str) -> None:
        super().__init__(entries)
        self._where = where

    def __missing__(self, key: str) -> Any:
        raise StepscopeError(
            f"{self._where} has no {key!r}", "was it written by another version of Stepscope?"
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
        msgspec.convert(config, Settings)
    except msgspec.ValidationError as error:
        raise StepscopeError(f"not a record: in its config: {in_one_line(error)}") from error


def _check_numbers(value: object) -> None:
    if isinstance(value, int) and abs(value) >= 2**63:
        raise StepscopeError("not a record: a number of its config has more than 64 bits")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _check_numbers(part)
