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
_PHRASES = {
    "batch": "batch {}",
    "attention": "{} attention",
    "compile": "compiled by {}",
    "optimizer": "Stepscope's AdamW",
    "compile_mode": "compile mode {}",
    "loss": "loss {}",
    "fused": "fused kernels",
    "fused_projections": "fused projections",
    "autotune_gemms": "autotuned GEMMs",
    "activation_policy": "saves {}",
    "graph": "as a CUDA graph",
    "checkpoint": "checkpointed: {}",
    "table": "sizes of {}",
}
"""Phrase for a value that all rows share."""
_SPECIAL = {
    ("compile", "no"): "eager",
    ("optimizer", "torch"): "torch's AdamW",
    ("optimizer", "torch-fused"): "torch's fused AdamW",
    ("optimizer", "stepscope-fused"): "Stepscope's AdamW in one launch",
    ("compile_mode", "default"): "",
    ("loss", "plain"): "",
    ("activation_policy", ALL): "",
    ("checkpoint", "no"): "",
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
    "fused_projections": Column(title="fused projections", hint="fused QKV and fused gate/up"),
    "autotune_gemms": Column(
        title="autotuned GEMMs", hint="the fastest kernel of cuBLAS for each shape"
    ),
    "activation_policy": Column(title="saves", hint="what a block saves for backward"),
    "graph": Column(title="graph"),
    "checkpoint": Column(title="checkpoint", hint="blocks of a checkpointed segment"),
    "table": Column(title="table"),
}


def step_columns(rows: Sequence[OfStep]) -> tuple[list[Declared], str]:
    """The columns in which these rows differ, and a phrase for what they have in common."""
    varying, shared = [], []
    built_in = any(not row.workload.own for row in rows)
    for name, column in _IDENTITY.items():
        if not built_in and name in _BUILT_IN_ONLY:
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
    return row.workload.size_name if name == "size" else value


def _in_words(name: str, value: Any) -> str:
    if value is False:
        return ""
    return _SPECIAL.get((name, value), _PHRASES.get(name, "{}").format(value))
