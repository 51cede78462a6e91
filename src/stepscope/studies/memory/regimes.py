"""Bytes for each parameter by regime: number format of weights, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.model import cost
from stepscope.model.config import PRECISIONS, Precision
from stepscope.model.sizes import find_size
from stepscope.records.memory import WEIGHT_COPIES
from stepscope.report.blocks import Cell, Column, Finding, Table
from stepscope.report.format import number
from stepscope.studies.memory.rows import Accounted

_REGIMES = ("float32", "bfloat16", "bfloat16-pure", "bfloat16-master")
_MASTER = "bfloat16-master"


class _Regime:
    """What the closed forms say of one parameter."""

    def __init__(self, form: Precision) -> None:
        # Any model gives the same: all three grow with the number of parameters alone.
        model = find_size("tiny")
        count = cost.parameters(model).total
        self.form = form
        self.weights = cost.weight_bytes(model, form) // count
        self.gradients = cost.gradient_bytes(model, form) // count
        self.state = cost.optimizer_bytes(model, form) // count
        self.copies = 2 if form.autocast else 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.state


def _measured(cases: Sequence[Accounted]) -> dict[str, Accounted]:
    """Of each format the train step with the highest peak."""
    found: dict[str, Accounted] = {}
    for case in cases:
        form = case.workload.dtype
        if case.workload.mode == "train-step" and (
            form not in found or case.peak > found[form].peak
        ):
            found[form] = case
    return found


def regimes_table(cases: Sequence[Accounted]) -> Table:
    measured = _measured(cases)
    rows: list[tuple[Cell, ...]] = []
    for name in _REGIMES:
        regime, case = _Regime(PRECISIONS[name]), measured.get(name)
        rows.append(
            (
                f"{name} autocast" if regime.form.autocast else name,
                regime.weights,
                regime.gradients,
                regime.state,
                regime.total,
                case.per_parameter if case else None,
                regime.copies,
                regime.total / 4,
                regime.total / regime.weights,
                regime.form.help,
            )
        )
    return Table(
        name="memory-regimes",
        title="Bytes for each parameter, by regime",
        columns=(
            Column(title="regime"),
            Column(title="weights", kind="count", unit="B"),
            Column(title="gradients", kind="count", unit="B"),
            Column(
                title="optimizer state", kind="count", unit="B",
                hint="AdamW: two moments, and a float32 copy where there are master weights",
            ),
            Column(title="sum", kind="count", unit="B", hint="from the formats alone"),
            Column(title="measured", kind="number", unit="B", hint="the same lines of the account"),
            Column(
                title=WEIGHT_COPIES, kind="count", unit="B",
                hint="for matrices, while the graph lives; not in the sum",
            ),
            Column(title="× float32 weights", kind="number"),
            Column(title="× its own weights", kind="number"),
            Column(title="what it is"),
        ),
        rows=tuple(rows),
        caption="Activations come on top. With master weights an optimizer inside of them gets a"
        " float32 gradient too while it runs, 4 B more; stepscope-fused does not.",
    )  # fmt: skip


def regime_findings(cases: Sequence[Accounted]) -> Iterator[Finding]:
    """Where the “4×” and the “8× the model” come from."""
    plain, narrow = _Regime(PRECISIONS["float32"]), _Regime(PRECISIONS[_MASTER])
    measured = _measured(cases)
    told = "; ".join(
        f"{name} {number(case.per_parameter, 4)} B measured,"
        f" {_Regime(PRECISIONS[name]).total} B by the formats"
        for name, case in measured.items()
        if name in _REGIMES
    )
    if not told:
        return
    yield Finding(
        text=f"“{plain.total // plain.weights}× the model” is a float32 step: {plain.weights} B of"
        f" weight, {plain.gradients} of gradient, {plain.state} of AdamW's moments."
        f" “{narrow.total // narrow.weights}×” is bfloat16 with float32 master weights, the same"
        f" {narrow.total} B for each parameter counted in weights of {narrow.weights} B; only"
        f" without master weights is it less ({_Regime(PRECISIONS['bfloat16-pure']).total} B)."
        f" Weights, gradients and optimizer state for each parameter here: {told}."
    )
