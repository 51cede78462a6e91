"""Columns that distinguish training steps in a table, and a phrase for what the steps share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from stepscope.report.blocks import Cell
from stepscope.report.tables import Declared
from stepscope.training.settings import SETTINGS
from stepscope.training.workload import Workload


class OfStep(Protocol):
    """A row about one training step."""

    @property
    def workload(self) -> Workload: ...


_ALWAYS = ("size", "context")
_BUILT_IN_ONLY = ("context", "attention", "table")
"""Fields that a user's model does not have."""


def step_columns(rows: Sequence[OfStep]) -> tuple[list[Declared], str]:
    """The columns in which these rows differ, and a phrase for what they have in common."""
    varying, shared = [], []
    built_in = any(not row.workload.own for row in rows)
    for name, setting in SETTINGS.items():
        if setting.column is None or (not built_in and name in _BUILT_IN_ONLY):
            continue
        values = {getattr(row.workload, name) for row in rows}
        if name in _ALWAYS or len(values) > 1:
            varying.append(Declared(setting.column, partial(_cell, name), key=True))
        else:
            shared.append(setting.in_words(next(iter(values))))
    changed = {f"{k}={v}" for row in rows for k, v in row.workload.overrides.items()}
    if changed:
        shared.append("overridden: " + ", ".join(sorted(changed)))
    return varying, ", ".join(filter(None, shared))


def _cell(name: str, row: OfStep) -> Cell:
    value: Cell = getattr(row.workload, name)
    if row.workload.own and name in _BUILT_IN_ONLY:
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    return row.workload.size_name if name == "size" else value
