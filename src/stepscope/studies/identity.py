"""Columns that distinguish training steps in a table, and a phrase for what the steps share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from stepscope.kernels.activation_policy import ALL
from stepscope.report.blocks import Cell, Column
from stepscope.report.tables import Declared
from stepscope.studies.training.workload import Workload


class OfStep(Protocol):
    """A row about one training step."""

    @property
    def workload(self) -> Workload: ...


_ALWAYS = ("size", "context")
_BUILT_IN_ONLY = ("context", "attention", "table")
"""Fields that a user's model does not have."""
_YES = {
    "fused": "fused kernels",
    "joined": "fused projections",
    "searched": "autotuned GEMMs",
    "graph": "as a CUDA graph",
}
_IDENTITY: dict[str, Column] = {
    "size": Column(title="size"),
    "context": Column(title="context", kind="count"),
    "batch": Column(title="batch", kind="count"),
    "dtype": Column(title="dtype"),
    "attention": Column(title="attention"),
    "compile": Column(title="compile"),
    "optimizer": Column(title="optimizer"),
    "compile_mode": Column(title="compile mode"),
    "loss": Column(title="loss"),
    "fused": Column(title="fused kernels"),
    "joined": Column(title="fused projections", hint="fused QKV and fused gate/up"),
    "searched": Column(title="autotuned GEMMs", hint="the fastest kernel of cuBLAS for each shape"),
    "keep": Column(title="saves", hint="what a block saves for backward"),
    "graph": Column(title="graph"),
    "checkpoint": Column(title="checkpoint", hint="blocks of a checkpointed segment"),
    "table": Column(title="table"),
}


def step_columns(rows: Sequence[OfStep]) -> tuple[list[Declared], str]:
    """The columns in which these rows differ, and a phrase for what they have in common."""
    varying, shared = [], []
    ours = any(not row.workload.own for row in rows)
    for name, column in _IDENTITY.items():
        if not ours and name in _BUILT_IN_ONLY:
            continue
        values = {getattr(row.workload, name) for row in rows}
        if name in _ALWAYS or len(values) > 1:
            varying.append(Declared(column, partial(_cell, name), key=True))
        else:
            shared.append(_in_words(name, next(iter(values))))
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
    return f"{value} (changed)" if name == "size" and row.workload.overrides else value


def _in_words(name: str, value: Any) -> str:
    if name == "compile":
        return "eager" if value == "no" else f"compiled by {value}"
    if name == "optimizer":
        return {
            "torch": "torch's AdamW",
            "torch-fused": "torch's fused AdamW",
            "stepscope-fused": "Stepscope's AdamW in one launch",
        }.get(value, "Stepscope's AdamW")
    if name in ("compile_mode", "loss"):
        usual = {"compile_mode": "default", "loss": "plain"}[name]
        return "" if value == usual else f"{name.replace('_', ' ')} {value}"
    if isinstance(value, bool):
        return _YES[name] if value else ""
    if name == "keep":
        return "" if value == ALL else f"saves {value}"
    if name == "checkpoint":
        return "" if value == "no" else f"checkpointed: {value}"
    if name == "table":
        return f"sizes of {value}"
    return {"batch": f"batch {value}", "attention": f"{value} attention"}.get(name, str(value))
