"""A predicted memory peak as tables: by phase, and by line at the peak. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.predict.fit import MARGIN, changes_that_fit, fits
from stepscope.analysis.predict.plan import StepPlan
from stepscope.analysis.predict.step import Prediction
from stepscope.model.checkpointing import NONE
from stepscope.model.memory import ALL
from stepscope.records.memory import SAVED, saved_bytes
from stepscope.report.blocks import Cell, Column, Finding, Kind, Table
from stepscope.report.format import bytes_, percent

_BYTES: Kind = "bytes"
_CONTEXT = "; CUDA's context and libraries, 0.5 to 1.5 GiB, come on top in `nvidia-smi`"
_BLOCKS = "Blocks of the allocator, which are up to 1 MiB larger than what was asked for."


def phases_table(predictions: Sequence[tuple[str, Prediction]]) -> Table:
    """One row for each step: the peak of each of its phases."""
    names = list(dict.fromkeys(moment.phase for _, told in predictions for moment in told.phases))
    on_gpu = any(told.plan.device == "cuda" for _, told in predictions)
    rows: list[tuple[Cell, ...]] = []
    for name, told in predictions:
        plan, peaks = told.plan, {moment.phase: moment.allocated for moment in told.phases}
        rows.append(
            (
                name,
                plan.context,
                plan.batch,
                plan.dtype,
                plan.attention,
                plan.mode,
                *(peaks.get(phase) for phase in names),
                told.peak.allocated,
                told.peak.reserved,
            )
        )
    return Table(
        name="predicted-phases",
        title="Predicted peak of each phase",
        columns=(
            Column(title="size"),
            Column(title="context", kind="count"),
            Column(title="batch", kind="count"),
            Column(title="dtype"),
            Column(title="attention"),
            Column(title="mode"),
            *(Column(title=phase, kind=_BYTES) for phase in names),
            Column(title="peak", kind=_BYTES, hint="`max_memory_allocated` of the whole step"),
            Column(title="reserved", kind=_BYTES, hint="what the allocator has taken by then"),
        ),
        rows=tuple(rows),
        caption=f"Of the second step, which has optimizer state{_CONTEXT if on_gpu else ''}.",
    )


def ledger_table(told: Prediction) -> Table:
    """What is live at the peak of each phase, largest line first."""
    rows: list[tuple[Cell, ...]] = []
    order = sorted(
        {line for moment in told.phases for line in moment.lines},
        key=lambda line: -max(moment.lines.get(line, 0) for moment in told.phases),
    )
    for line in order:
        rows.append((line, *(moment.lines.get(line) for moment in told.phases)))
    rows.append(("sum", *(sum(moment.lines.values()) for moment in told.phases)))
    return Table(
        name="predicted-ledger",
        title="What is live at the peak of each phase",
        columns=(
            Column(title="line"),
            *(Column(title=moment.phase, kind=_BYTES) for moment in told.phases),
        ),
        rows=tuple(rows),
        caption=f"{_BLOCKS if told.plan.device == 'cuda' else 'Tensors.'}"
        f" Lines that begin with “{SAVED.strip()}” are activations kept for backward, by the part"
        " of the model and the operator that keeps them.",
    )


def peak_finding(name: str, told: Prediction) -> Finding:
    peak = told.peak
    line, largest = peak.largest
    saved = saved_bytes(peak.lines)
    return Finding(
        text=f"{name}: the peak is {bytes_(peak.allocated)}, in the {peak.phase} phase,"
        f" {bytes_(saved)} of it activations kept for backward; the largest single tensor has"
        f" {bytes_(largest)} ({line})."
    )


def budget_findings(name: str, told: Prediction, budget: int) -> tuple[Finding, ...]:
    """Whether it fits, and if not the smallest changes that do."""
    peak = told.peak.allocated
    if fits(told.plan, peak, budget):
        return (
            Finding(
                text=f"{name} fits into {bytes_(budget)}: {bytes_(peak)} predicted.", tone="good"
            ),
        )
    beyond = peak * MARGIN - budget
    why = (
        f"{bytes_(beyond)} too much, with a margin of {percent(MARGIN - 1)}."
        if beyond > 0
        else f"{bytes_(peak)} predicted, and with the gaps between its blocks more is needed."
    )
    missing = f"{name} does not fit into {bytes_(budget)}: {why}"
    changes = changes_that_fit(told.plan, budget)
    if not changes:
        weights = told.phases[0].allocated
        return (
            Finding(
                text=f"{missing} No change that is known here fits either; the model alone has"
                f" {bytes_(weights)}.",
                tone="warn",
            ),
        )
    listed = "; ".join(f"{change.words} ({bytes_(change.peak)})" for change in changes)
    return (Finding(text=f"{missing} Smallest change first, with: {listed}.", tone="warn"),)


def plan_name(size_name: str, plan: StepPlan) -> str:
    extras = [
        *([] if plan.attention == "reference" else [plan.attention]),
        *(["fused loss"] if plan.loss == "fused" else []),
        *(["fused pieces"] if plan.fused else []),
        *(["joined products"] if plan.joined else []),
        *([] if plan.keep == ALL else [f"keeps {plan.keep}"]),
        *(["updates in the backward"] if plan.updates_in_backward else []),
        *(["as a graph"] if plan.graph else []),
        *([] if plan.checkpoint == NONE else [f"checkpointed: {plan.checkpoint}"]),
        *([f"{plan.ranks} ranks, sharding {plan.sharding}"] if plan.ranks > 1 else []),
    ]
    words = f"{size_name} at context {plan.context}, batch {plan.batch}, in {plan.dtype}"
    return f"{words} ({', '.join(extras)})" if extras else words
