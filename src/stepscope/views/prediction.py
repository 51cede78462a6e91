"""Tables and findings of a predicted memory peak: by phase, and by line at the peak. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from stepscope.analysis.conclusions import NOTHING, deduced
from stepscope.analysis.predict.fit import MARGIN, changes_that_fit, fits, within
from stepscope.analysis.predict.memory import MemoryState
from stepscope.analysis.predict.plan import StepPlan
from stepscope.analysis.predict.step import Prediction
from stepscope.records.memory import OPTIMIZER, PARAMETERS, SAVED, PhasePeak, saved_bytes
from stepscope.records.plans import (
    FittedStep,
    FittingBatch,
    Frontier,
    MeasuredSteps,
    Plan,
    Planned,
    PlannedStep,
    thinned,
)
from stepscope.report.blocks import Block, Cell, Curve, Figure, Finding, Table, Value
from stepscope.report.format import bytes_, duration, percent
from stepscope.report.tables import col, cols, table
from stepscope.training.settings import unusual_settings

if TYPE_CHECKING:
    from stepscope.planning.fake_run import MemoryPrediction

_CONTEXT = "; CUDA's context and libraries, 0.5 to 1.5 GiB, come on top in `nvidia-smi`"
_GIB = 2**30
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


def _peak_finding(
    name: str, peak: PhasePeak | MemoryState, more: str, word: str = "predicted", **values: Value
) -> Finding:
    saved = saved_bytes(peak.lines)
    known: dict[str, Value] = {"step": name, "peak": peak.allocated, "phase": peak.phase}
    return Finding(
        code="prediction.peak",
        values=known | {"saved": saved} | values,
        text=f"{name}: the {word} peak is {bytes_(peak.allocated)}, in the {peak.phase} phase,"
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
    """`fitting` has what else fits, with its peak; `alone` is said if there is nothing."""
    values: dict[str, Value] = {"step": name, "budget": budget, "peak": peak}
    listed = "; ".join(f"{words} ({bytes_(size)})" for words, size in fitting)
    if does:
        return Finding(
            code="prediction.fits",
            values=values,
            text=f"{name} fits into {bytes_(budget)}: {bytes_(peak)} predicted.",
            conclusion=deduced(f"The largest that fits: {listed}.") if fitting else NOTHING,
            tone="good",
            timed=False,
        )
    beyond = peak * MARGIN - budget
    why = (
        f"{bytes_(beyond)} too much, with a margin of {percent(MARGIN - 1)}."
        if beyond > 0
        else f"{bytes_(peak)} predicted, and fragmentation needs more."
    )
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


def _assumed_findings(name: str, lines: Sequence[str]) -> list[Finding]:
    return [
        Finding(
            code="prediction.value-assumed",
            values={"step": name, "line": line},
            text=f"A value that depends on the weights was read at {line} and taken as zero: if it"
            " decides what the step computes, its memory differs.",
            tone="warn",
            timed=False,
        )
        for line in lines
    ]


def model_findings(
    name: str,
    prediction: MemoryPrediction,
    budget: int | None,
    fitting: Sequence[FittingBatch],
) -> list[Finding]:
    peak = prediction.peak
    reserved = f"the allocator reserves {bytes_(prediction.reserved)}"
    if prediction.is_graph:
        reserved = f"{bytes_(prediction.graph_pool)} are in the pool of its CUDA graph; {reserved}"
    word = "estimated" if prediction.is_estimate else "predicted"
    findings = [_peak_finding(name, peak, reserved, word, estimate=prediction.is_estimate)]
    findings += _assumed_findings(name, prediction.assumed)
    if budget is not None:
        kept = sum(peak.lines.get(line, 0) for line in (PARAMETERS, OPTIMIZER))
        alone = f"parameters and optimizer state alone have {bytes_(kept)}"
        does = peak.allocated * MARGIN <= budget
        others = [(str(one), one.peak_bytes) for one in fitting]
        findings.append(_budget_finding(name, peak.allocated, budget, others, alone, does=does))
    return findings


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
            f" {fitting.words}."
            if fitting
            else f"No plan fits into {bytes_(budget)}, with a margin of {percent(MARGIN - 1)}.",
            tone="good" if fitting else "warn",
            timed=False,
        )
    )
    return findings


def fitted_findings(planned: FittedStep) -> list[Finding]:
    """The plan of a script's step within its budget."""
    plan, plain = planned.plan, planned.frontier.plans[0]
    batch = f" at batch {planned.batch}" if planned.batch else ""
    word = "estimated" if planned.is_estimate else "predicted"
    more = percent(plan.seconds / plain.seconds - 1)
    text = (
        f"The step of {planned.model}{batch} fits into {bytes_(planned.budget)} as it is:"
        f" {bytes_(plan.peak)} {word}."
        if plan.is_plain
        else f"The step of {planned.model}{batch} fits into {bytes_(planned.budget)} with a plan:"
        f" {bytes_(plan.peak)} {word} instead of {bytes_(plain.peak)}, in {more} more time at the"
        f" rates of {planned.frontier.device}."
    )
    found = Finding(
        code="prediction.plan-fits",
        values={"budget": planned.budget, "peak": plan.peak, "plain": plain.peak},
        text=text,
        tone="good",
        timed=False,
    )
    return [found, *_assumed_findings(planned.model, planned.assumed)]


def fitted_table(planned: FittedStep) -> Table:
    """What each group of blocks does, its bytes, and its cost."""
    columns = [
        col("blocks", lambda group: group.number, "count"),
        col("plan", lambda group: group.words),
        col("saved", lambda group: group.number * max(0, group.saved), "bytes"),
        col("in host memory", lambda group: group.number * group.to_host, "bytes"),
        col("recomputation", lambda group: 1e3 * group.number * group.again_s, unit="ms"),
    ]
    states = planned.plan.host_states
    host = f" Optimizer states in host memory: {bytes_(states)}." if states else ""
    return table(
        "fitted-plan",
        "Plan",
        planned.plan.groups,
        columns,
        caption=f"A step takes {duration(1e3 * planned.plan.seconds)} at the rates of"
        f" {planned.frontier.device}, {duration(1e3 * planned.plan.exposed_s)} of it copies that it"
        f" does not hide.{host} `TrainStep(memory=…)` and `stepscope.fit` apply a plan in your own"
        " code.",
    )


def measured_finding(
    planned: FittedStep, measured: MeasuredSteps, base: MeasuredSteps | None
) -> Finding:
    """Steps with the plan against the prediction, and against those without it."""
    plan, peak = planned.plan, measured.peak
    parts = [f"With the plan a step takes {duration(measured.step_ms)}"]
    if base is not None:
        more = percent(measured.step_ms / base.step_ms - 1)
        parts.append(f"{duration(base.step_ms)} without it ({more} more)")
    elif not plan.is_plain:
        parts.append("without it the script runs out of memory")
    if peak is None:
        parts.append("its peak is measured on a GPU only")
    else:
        error = percent(peak / plan.peak - 1)
        within = "within" if peak <= planned.budget else "above"
        parts.append(f"its peak is {bytes_(peak)}, {error} off the prediction and {within} budget")
    return Finding(
        code="prediction.plan-measured",
        values={"step_ms": measured.step_ms, "peak": peak, "budget": planned.budget},
        text=f"{'; '.join(parts)}.",
        tone="good" if peak is not None and peak <= planned.budget else "info",
        timed=False,
    )


def planned_findings(planned: Planned) -> list[Finding]:
    """Whether twice the batch and twice the context fit, and with which plans."""
    own = next((one for one in planned if one.what == "step"), None)
    return [_larger_finding(own, one) for one in planned if own is not None and one.what != "step"]


def _larger_finding(own: PlannedStep, larger: PlannedStep) -> Finding:
    plain, plan = larger.frontier.plans[0], larger.plan
    most = f" The largest batch that fits as it is: {larger.largest}." if larger.largest else ""
    before = own.frontier.plans[0] if own.plan is None else own.plan
    name = (
        f"{'Batch' if larger.what == 'batch' else 'Context'} {larger.size}, twice the current one,"
    )
    values: dict[str, Value] = {"size": larger.size, "peak": plain.peak, "largest": larger.largest}
    code = f"prediction.larger-{larger.what}"
    if plan is None:
        smallest = larger.frontier.plans[-1].peak
        text = f"{name} does not fit: the smallest plan needs {bytes_(smallest)}.{most}"
        return Finding(code=code, values=values, text=text, timed=False)
    how = f"as it is, with {bytes_(plan.peak)}"
    if not plan.is_plain:
        how = (
            f"with a plan ({plan.words}): {bytes_(plan.peak)} instead of {bytes_(plain.peak)}, in"
            f" {percent(plan.seconds / plain.seconds - 1)} more time than without it"
        )
    faster = 2 * before.seconds / plan.seconds - 1
    word = "more" if faster >= 0 else "fewer"
    return Finding(
        code=code,
        values=values | {"fitted": plan.peak, "faster": faster},
        text=f"{name} is predicted to fit {how}; {percent(abs(faster))} {word}"
        f" {'samples' if larger.what == 'batch' else 'tokens'} per second at the rates of"
        f" {larger.frontier.device}.{most}",
        timed=False,
    )


def planned_blocks(planned: Planned) -> tuple[Block, ...]:
    """The plans of a recorded step as a figure and a table."""
    own = next((one for one in planned if one.what == "step"), None)
    if own is None or len(own.frontier.plans) < 2:
        return ()
    chosen = None if own.plan is None or own.plan.is_plain else own.plan
    return (frontier_figure(own.frontier.plans, chosen), frontier_table(own.frontier))


def frontier_facts(found: Frontier) -> dict[str, Any]:
    """The plans as plain data, for `--json`."""
    plans = [
        {
            "peak_bytes": plan.peak,
            "seconds": plan.seconds,
            "host_bytes": plan.to_host,
            "blocks": plan.words,
        }
        for plan in found.plans
    ]
    return {
        "plans": plans,
        "device": found.device,
        "ranks": found.ranks,
        "sharding": found.sharding,
    }


def frontier_figure(plans: Sequence[Plan], chosen: Plan | None) -> Figure:
    """The plans, the step as it is, and the plan within a budget."""
    curves = [_curve("plans", plans), _curve("as it is", plans[:1])]
    if chosen is not None:
        curves.append(_curve("within the budget", [chosen]))
    return Figure(
        name="predicted-frontier",
        title="Time against memory",
        curves=tuple(curves),
        x_label="predicted peak, GiB",
        y_label="predicted step, ms",
    )


def _curve(label: str, plans: Sequence[Plan]) -> Curve:
    return Curve(
        label=label,
        x=tuple(plan.peak / _GIB for plan in plans),
        y=tuple(1e3 * plan.seconds for plan in plans),
    )


def frontier_table(found: Frontier, most: int = 12) -> Table:
    """Plans from the fastest to the smallest, at most so many."""
    first = found.plans[0]
    columns = [
        col("peak", lambda plan: plan.peak, "bytes"),
        col("step", lambda plan: 1e3 * plan.seconds, unit="ms"),
        col("more time", lambda plan: plan.seconds / first.seconds - 1, "percent"),
        col("recomputation", lambda plan: 1e3 * plan.again_s, unit="ms"),
        col("in host memory", lambda plan: plan.to_host, "bytes"),
        col("blocks", lambda plan: plan.words),
    ]
    return table(
        "predicted-plans",
        "Time against memory",
        thinned(found.plans, most),
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
