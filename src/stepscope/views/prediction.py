"""Tables and findings of a predicted memory peak: by phase, and by line at the peak. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from stepscope.analysis.conclusions import deduced
from stepscope.analysis.predict.fit import MARGIN, changes_that_fit, fits
from stepscope.analysis.predict.memory import MemoryState
from stepscope.analysis.predict.plan import StepPlan
from stepscope.analysis.predict.step import Prediction
from stepscope.records.memory import OPTIMIZER, PARAMETERS, SAVED, PhasePeak, saved_bytes
from stepscope.report.blocks import Cell, Finding, Table, Value
from stepscope.report.format import bytes_, duration, percent
from stepscope.report.tables import col, cols, table
from stepscope.training.settings import unusual_settings

if TYPE_CHECKING:
    from stepscope.planning.frontier import MemoryPlan
    from stepscope.planning.predict import MemoryPrediction

_CONTEXT = "; CUDA's context and libraries, 0.5 to 1.5 GiB, come on top in `nvidia-smi`"
_SETTINGS = ("dtype", "attention", "optimizer", "loss", "checkpoint", "mode")
SECOND_STEP = f"For the second step, which has optimizer state{_CONTEXT}."
BLOCKS = "Blocks of the allocator, which are up to 1 MiB larger than the request."


def lines_table(
    name: str,
    title: str,
    phases: Sequence[tuple[str, Mapping[str, int]]],
    footer: Iterable[Sequence[Cell]],
    *,
    caption: str,
) -> Table:
    """Table of bytes by line and phase, the largest line first, with the rows of `footer` below."""
    lines = sorted(
        {line for _, sizes in phases for line in sizes},
        key=lambda line: (-max(sizes.get(line, 0) for _, sizes in phases), line),
    )
    rows = [(line, *(sizes.get(line) for _, sizes in phases)) for line in lines]
    columns = [col(phase, itemgetter(i), "bytes") for i, (phase, _) in enumerate(phases, start=1)]
    return table(
        name, title, [*rows, *footer], [col("line", itemgetter(0)), *columns], caption=caption
    )


def phases_table(predictions: Sequence[tuple[str, Prediction]]) -> Table:
    """One row per step: the peak of each of its phases."""
    names = list(
        dict.fromkeys(moment.phase for _, prediction in predictions for moment in prediction.phases)
    )
    on_gpu = any(prediction.plan.device == "cuda" for _, prediction in predictions)
    columns = [
        col("size", itemgetter(0)),
        col("context", lambda row: row[1].plan.context, "count"),
        col("batch", lambda row: row[1].plan.batch, "count"),
        *cols(_SETTINGS, lambda row, name: getattr(row[1].plan, name)),
        *cols(names, lambda row, phase: _at_peak(row[1], phase), "bytes"),
        col(
            "peak",
            lambda row: row[1].peak.allocated,
            "bytes",
            hint="`max_memory_allocated` of the full step",
        ),
        col(
            "reserved",
            lambda row: row[1].peak.reserved,
            "bytes",
            hint="what the allocator has reserved by then",
        ),
    ]
    return table(
        "predicted-phases",
        "Predicted peak of each phase",
        predictions,
        columns,
        caption=SECOND_STEP if on_gpu else SECOND_STEP.replace(_CONTEXT, ""),
    )


def _at_peak(prediction: Prediction, phase: str) -> int | None:
    return next((peak.allocated for peak in prediction.phases if peak.phase == phase), None)


def ledger_table(phases: Sequence[PhasePeak | MemoryState], caption: str) -> Table:
    """Live memory at the peak of each phase."""
    return lines_table(
        "predicted-ledger",
        "Live memory at the peak of each phase",
        [(peak.phase, peak.lines) for peak in phases],
        [("sum", *(peak.allocated for peak in phases))],
        caption=f"{caption} Lines that begin with “{SAVED.strip()}” are activations saved for"
        " backward, by the part of the model and the operator that saves them.",
    )


def peak_finding(name: str, prediction: Prediction) -> Finding:
    line, largest = prediction.peak.largest
    text = f"the largest single tensor has {bytes_(largest)} ({line})"
    return _peak_finding(name, prediction.peak, text, largest=largest, largest_line=line)


def _peak_finding(name: str, peak: PhasePeak | MemoryState, more: str, **values: Value) -> Finding:
    saved = saved_bytes(peak.lines)
    known: dict[str, Value] = {"step": name, "peak": peak.allocated, "phase": peak.phase}
    return Finding(
        code="prediction.peak",
        values=known | {"saved": saved} | values,
        text=f"{name}: the predicted peak is {bytes_(peak.allocated)}, in the {peak.phase} phase,"
        f" {bytes_(saved)} of it activations saved for backward; {more}.",
        timed=False,
    )


def budget_finding(name: str, prediction: Prediction, budget: int) -> Finding:
    """Finding whether the step fits the budget, and the smallest changes that make it fit."""
    peak = prediction.peak.allocated
    does = fits(prediction.plan, peak, budget)
    changes = () if does else changes_that_fit(prediction.plan, budget)
    alone = f"the model alone has {bytes_(prediction.phases[0].allocated)}"
    fitting = [(change.words, change.peak) for change in changes]
    return _budget_finding(name, peak, budget, fitting, alone, does=does)


def _budget_finding(
    name: str,
    peak: int,
    budget: int,
    fitting: Sequence[tuple[str, int]],
    alone: str,
    *,
    does: bool,
) -> Finding:
    """`fitting` has what fits instead, with its peak; `alone` is said if there is nothing."""
    values: dict[str, Value] = {"step": name, "budget": budget, "peak": peak}
    if does:
        return Finding(
            code="prediction.fits",
            values=values,
            text=f"{name} fits into {bytes_(budget)}: {bytes_(peak)} predicted.",
            tone="good",
            timed=False,
        )
    beyond = peak * MARGIN - budget
    why = (
        f"{bytes_(beyond)} too much, with a margin of {percent(MARGIN - 1)}."
        if beyond > 0
        else f"{bytes_(peak)} predicted, and fragmentation needs more."
    )
    listed = "; ".join(f"{words} ({bytes_(size)})" for words, size in fitting)
    return Finding(
        code="prediction.does-not-fit",
        values=values | {"change": fitting[0][0] if fitting else None},
        text=f"{name} does not fit into {bytes_(budget)}: {why}",
        conclusion=deduced(
            f"Smallest change first, with: {listed}."
            if fitting
            else f"No known change fits either; {alone}."
        ),
        tone="warn",
        timed=False,
    )


def model_findings(
    name: str,
    prediction: MemoryPrediction,
    budget: int | None,
    fitting: Sequence[tuple[object, MemoryPlan]],
) -> list[Finding]:
    peak = prediction.peak
    findings = [_peak_finding(name, peak, f"the allocator reserves {bytes_(prediction.reserved)}")]
    findings += [
        Finding(
            code="prediction.value-assumed",
            values={"step": name, "line": line},
            text=f"A value that depends on the weights was read at {line} and taken as zero: if it"
            " decides what the step computes, its memory differs.",
            tone="warn",
            timed=False,
        )
        for line in prediction.assumed
    ]
    if budget is not None:
        kept = sum(peak.lines.get(line, 0) for line in (PARAMETERS, OPTIMIZER))
        alone = f"parameters and optimizer state alone have {bytes_(kept)}"
        others = [(f"{step}: {plan_words(plan)}", plan.peak) for step, plan in fitting]
        does = peak.allocated * MARGIN <= budget
        findings.append(_budget_finding(name, peak.allocated, budget, others, alone, does=does))
    return findings


class Frontier(NamedTuple):
    """The plans of a step on one rank of several, the fastest first."""

    plans: list[MemoryPlan]
    device: str
    """The device at whose rates times are predicted."""
    ranks: int
    sharding: str


def frontier_findings(name: str, found: Frontier, budget: int | None) -> list[Finding]:
    """The step as it is, and the fastest plan that fits the budget."""
    first, last = found.plans[0], found.plans[-1]
    where = f" on each of {found.ranks} ranks" if found.ranks > 1 else ""
    without = ", without communication" if found.ranks > 1 else ""
    findings = [
        Finding(
            code="prediction.plans",
            values={"step": name, "peak": first.peak, "smallest": last.peak, "ranks": found.ranks},
            text=f"{name}: the predicted peak{where} is {bytes_(first.peak)} and the step takes"
            f" {duration(1e3 * first.seconds)} at the rates of {found.device}{without}; the"
            f" smallest plan has {bytes_(last.peak)} and takes"
            f" {percent(last.seconds / first.seconds - 1)} more time.",
            timed=False,
        )
    ]
    if budget is None:
        return findings
    fitting = within(found, budget)
    findings.append(
        Finding(
            code="prediction.plan-fits" if fitting else "prediction.no-plan-fits",
            values={"budget": budget, "peak": fitting.peak if fitting else last.peak},
            text=f"The fastest plan that fits into {bytes_(budget)} has {bytes_(fitting.peak)} and"
            f" takes {percent(fitting.seconds / first.seconds - 1)} more time:"
            f" {plan_words(fitting)}."
            if fitting
            else f"No plan fits into {bytes_(budget)}, with a margin of {percent(MARGIN - 1)}.",
            tone="good" if fitting else "warn",
            timed=False,
        )
    )
    return findings


def within(found: Frontier, budget: int | None) -> MemoryPlan | None:
    """Return the fastest plan that fits."""
    if budget is None:
        return None
    return next((plan for plan in found.plans if plan.peak * MARGIN <= budget), None)


def plan_words(plan: MemoryPlan) -> str:
    return "; ".join(f"{count} × {cost.plan}" for count, cost in plan.groups)


def frontier_table(found: Frontier, most: int = 12) -> Table:
    """Plans from the fastest to the smallest, at most so many."""
    plans, first = found.plans, found.plans[0]
    rows = [plans[round(i * (len(plans) - 1) / (most - 1))] for i in range(most)]
    columns = [
        col("peak", lambda plan: plan.peak, "bytes"),
        col("step", lambda plan: 1e3 * plan.seconds, unit="ms"),
        col("more time", lambda plan: plan.seconds / first.seconds - 1, "percent"),
        col("recomputation", lambda plan: 1e3 * plan.again_s, unit="ms"),
        col("in host memory", lambda plan: plan.to_host, "bytes"),
        col("blocks", plan_words),
    ]
    return table(
        "predicted-plans",
        "Time against memory",
        list(dict.fromkeys(rows)) if len(plans) > most else plans,
        columns,
        caption=f"Times from FLOPs, bytes and the rates of {found.device}. `stepscope.fit` applies"
        " the fastest plan within a budget.",
    )


def plan_name(size_name: str, plan: StepPlan) -> str:
    extras = unusual_settings(
        plan,
        *(
            "attention",
            "loss",
            "fused",
            "fused_projections",
            "activation_policy",
            "updates_in_backward" if plan.updates_in_backward else "optimizer",
            "graph",
        ),
        "checkpoint",
    )
    if plan.ranks > 1:
        extras.append(f"{plan.ranks} ranks, sharding {plan.sharding}")
    words = f"{size_name} at context {plan.context}, batch {plan.batch}, in {plan.dtype}"
    return f"{words} ({', '.join(extras)})" if extras else words
