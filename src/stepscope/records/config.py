"""The configuration of a record's case, checked once where the record is read.

A setting has the same type in every study, so one table of them serves all, and the pages of the
studies can rely on it. Settings that are not in the table are not checked.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from stepscope.errors import StepscopeError, in_one_line

_DEEPEST = 32
"""Levels of nesting; what studies record has less than 10."""

Counted = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
Whole = Counted | UnsetType
Some = Annotated[int, msgspec.Meta(ge=1, le=10**15)] | UnsetType
Rank = Annotated[int, msgspec.Meta(ge=0, lt=10**6)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=10**6)]
Positive = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Number = Positive | UnsetType
Text = str | UnsetType
Flag = bool | UnsetType


class Settings(msgspec.Struct, frozen=True, kw_only=True, rename={"pass_": "pass"}):
    """Every setting that the studies have, with its type and range."""

    accumulator: Text = UNSET
    arguments: list[str] | UnsetType = UNSET
    attention: Text = UNSET
    back_to_back: Whole = UNSET
    backend: Text = UNSET
    batch: Some | None = UNSET
    bucket_mb: list[Positive] | UnsetType = UNSET
    budget_bytes: Whole = UNSET
    causal: Flag = UNSET
    checkpoint: Text = UNSET
    collective: Text = UNSET
    compile: Text = UNSET
    compile_mode: Text = UNSET
    compute: Text = UNSET
    context: Whole = UNSET
    count: Whole = UNSET
    dtype: Text = UNSET
    format: Text = UNSET
    fused: Flag = UNSET
    graph: Flag = UNSET
    head: Some = UNSET
    heads: Some = UNSET
    how: Text = UNSET
    joined: Flag = UNSET
    keep: Text = UNSET
    kind: Text = UNSET
    length: list[Counted] | UnsetType = UNSET
    lever: Text = UNSET
    link: list[str] | UnsetType = UNSET
    loss: Text = UNSET
    loss_steps: Whole = UNSET
    mib: Whole = UNSET
    min_seconds: Number = UNSET
    mode: Text = UNSET
    model: Text = UNSET
    optimizer: Text = UNSET
    overrides: dict[str, Any] | UnsetType = UNSET
    own: Text = UNSET
    part: Text = UNSET
    pass_: Text = UNSET
    race: Text = UNSET
    racers: list[Any] | UnsetType = UNSET
    rank: Rank | UnsetType = UNSET
    ranks: Ranks | list[Ranks] | UnsetType = UNSET
    rounds: Whole = UNSET
    rows: Whole = UNSET
    rung: Text = UNSET
    samples: Whole = UNSET
    script: Text = UNSET
    searched: Flag = UNSET
    seq: Some = UNSET
    size: Text = UNSET
    sizes: list[Counted] | UnsetType = UNSET
    snapshot: Text = UNSET
    step_ms: Annotated[float, msgspec.Meta(gt=0, le=1e15)] | UnsetType | None = UNSET
    steps: Whole = UNSET
    subject: Text = UNSET
    table: Text = UNSET
    term: Annotated[float, msgspec.Meta(gt=0, le=1e15)] | UnsetType = UNSET
    terms: Text = UNSET
    timed: Whole = UNSET
    together_ms: Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)] | UnsetType | None = UNSET
    traced: Whole = UNSET
    warmup: Whole = UNSET
    warps: Whole = UNSET


class Named(dict[str, Any]):
    """Settings or notes of a record, which report a missing one as an error of that record."""

    def __init__(self, held: dict[str, Any], where: str) -> None:
        super().__init__(held)
        self._where = where

    def __missing__(self, key: str) -> Any:
        raise StepscopeError(
            f"{self._where} has no {key!r}", "was it made by another version of Stepscope?"
        )


def check_depth(value: dict[str, Any], part: str) -> None:
    """Raise StepscopeError where `value` is nested too deeply to be traversed and encoded again."""
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise StepscopeError(f"not a record: its {part} is nested more than {_DEEPEST} levels deep")


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
