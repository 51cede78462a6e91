"""The waterfall of a step as a figure, a table and a finding: lost time by cause, with the change
that recovers it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.analysis.conclusions import Conclusion, conclude, joined
from stepscope.analysis.effects import Effect, part
from stepscope.analysis.limits import rates_doubt, step_rates
from stepscope.analysis.power import Capped, power_capped
from stepscope.analysis.predict.plan import WITHIN_BACKWARD
from stepscope.analysis.trace.summary import Summary
from stepscope.analysis.verdict import Share, at_most
from stepscope.analysis.waterfall import CAUSES, Cause, Step, Waterfall, waterfall
from stepscope.model.config import ModelConfig, Precision, precision
from stepscope.records.schema import Record
from stepscope.records.stats import Summary as Stats
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Cell, Column, Finding, Table, Timeline
from stepscope.report.format import duration, number, percent
from stepscope.report.tables import Declared, col, cols, keep_columns, table
from stepscope.studies.training.workload import Workload
from stepscope.studies.views.energy import capped_finding
from stepscope.studies.views.figures import bar

_SHORT_NAMES = {"memory-bound operations": "memory-bound", "matmuls below the ceiling": "matmuls"}
_COLUMNS: dict[str, Cause] = {_SHORT_NAMES.get(cause, cause): cause for cause in CAUSES}
"""Causes by the title of their column."""
_FASTER_FROM = 0.01
_SCALED_FROM = 1.05
_TOO_LOW = (
    "Some parts are faster than their ideal, by {}: the rates were measured too low, perhaps on a"
    " busy machine, so the ideal and the parts beyond it exceed the step."
)
_KINDS = {
    "matmul": "matmuls",
    "attention": "attention",
    "memory": "other operations",
    "optimizer": "AdamW",
}

_STEP: list[Declared] = [
    col("step", lambda traced: traced.workload.name),
    col("mode", lambda traced: traced.workload.mode),
]


class StepWaterfall(NamedTuple):
    """The waterfall of one traced step."""

    workload: Workload
    water: Waterfall
    on_device: bool
    capped: Capped | None = None
    record: str = ""
    """The id of its record."""
    step: Stats | None = None
    """Samples of its measured time; None if only the traced time is known."""
    doubt: str = ""
    """Reason why the ideal time may be shorter: a ceiling that was measured too low."""

    def shown(self, ms: float) -> Effect:
        """A part of the measured time against what is unknown of it."""
        return part(ms, self.step if self.step else summarize([self.water.measured_ms]))


def step_waterfall(record: Record, workload: Workload, summary: Summary) -> StepWaterfall | None:
    """The waterfall of a record; None without the ceilings that an ideal time needs, or for a
    user's model. If the same kernels were replayed as a CUDA graph, the total is that time."""
    model = workload.shape
    if model is None:
        return None
    policy = precision(workload.dtype)
    rates = step_rates(record, policy.compute, fp8=policy.fp8)
    if rates is None:
        return None
    step = waterfall_step(workload, model, policy)
    series = record.find("replay") or record.find("step")
    timed = summarize(series.values) if series is not None and series.values else None
    water = waterfall(summary, step, rates, timed.median if timed else None)
    capped, doubt = power_capped(record), rates_doubt(record, policy.compute, fp8=policy.fp8)
    return StepWaterfall(workload, water, summary.on_device, capped, record.id, timed, doubt)


def waterfall_step(workload: Workload, model: ModelConfig, policy: Precision) -> Step:
    """The step whose ideal time a waterfall starts from."""
    w = workload
    return Step(model, w.batch, w.context, policy, w.mode, w.recomputations())


def waterfall_blocks(waterfalls: Sequence[StepWaterfall], name: str) -> tuple[Block, ...]:
    """A table of all; figures and findings of the slowest and of the fastest with its task."""
    if not waterfalls:
        return ()
    shown = _slowest_and_fastest(waterfalls)
    capped = {traced.workload.name: traced.capped for traced in waterfalls if traced.capped}
    return (
        *(_finding(traced) for traced in shown),
        *capped_finding(capped, tuple(traced.record for traced in waterfalls if traced.capped)),
        *(
            waterfall_figure(traced, f"{name}-waterfall" + (f"-{index}" if index > 1 else ""))
            for index, traced in enumerate(shown, start=1)
        ),
        _times_table(waterfalls, name),
        _shares_table(waterfalls, name),
    )


def _slowest_and_fastest(waterfalls: Sequence[StepWaterfall]) -> list[StepWaterfall]:
    """The slowest, and the fastest with the same task, or the fastest of all if it is alone."""
    slowest = max(waterfalls, key=_taken)
    others = [traced for traced in waterfalls if traced is not slowest]
    same = [traced for traced in others if _task(traced.workload) == _task(slowest.workload)]
    return [slowest, min(same or others, key=_taken)] if others else [slowest]


def _taken(traced: StepWaterfall) -> float:
    return traced.water.measured_ms


def _task(w: Workload) -> tuple[object, ...]:
    return w.table, w.size, w.overrides, w.context, w.batch, w.mode


def waterfall_figure(traced: StepWaterfall, name: str) -> Timeline:
    """Bars in which each cause begins where the previous one ended."""
    water, total = traced.water, traced.water.measured_ms
    lanes, at = [], 0.0
    for kind, ms in water.ideal.items():
        if ms > 0:
            lanes.append(bar(f"ideal: {_KINDS[kind]}", at, ms, total, "ideal"))
            at += ms
    for cause in CAUSES:
        ms = water.parts[cause]
        if abs(ms) >= 0.001 * total:
            group = "faster than ideal" if ms < 0 else _group(cause)
            lanes.append(bar(cause, min(at, at + ms), abs(ms), total, group))
        at += ms
    lanes.append(bar("measured", 0.0, total, total, "measured"))
    return Timeline(
        name=name,
        title=f"From the ideal to the measured step: {traced.workload.name}",
        lanes=tuple(lanes),
        x_label="ms",
        caption="A waterfall: each bar starts where the previous one ends. Ideal: for each"
        " operation the longer of its FLOPs at the measured matmul rate and its minimum bytes at"
        " the measured bandwidth. The rest is the time beyond, by cause; the parts add up to the"
        " measured time.",
    )


def _group(cause: Cause) -> str:
    if cause == "unattributed":
        return "unattributed"
    if cause == "communication":
        return "communication"
    return "idle" if cause == "launch gaps" else "lost"


def _shares_table(waterfalls: Sequence[StepWaterfall], name: str) -> Table:
    def share(traced: StepWaterfall, title: str) -> float:
        return traced.water.parts[_COLUMNS[title]] / traced.water.measured_ms

    full_table = table(
        f"{name}-waterfall-shares",
        "The same as shares of the measured time",
        waterfalls,
        [
            *_STEP,
            col("ideal", _ideal_share, "percent"),
            *cols(_COLUMNS, share, "percent"),
        ],
    )
    return keep_columns(full_table, _is_informative)


def _times_table(waterfalls: Sequence[StepWaterfall], name: str) -> Table:
    def largest(traced: StepWaterfall) -> Cause | None:
        part = traced.water.largest()
        return part[0] if part else None

    def recovers(traced: StepWaterfall) -> str | None:
        cause = largest(traced)
        return remedy(cause, traced) if cause else None

    full_table = table(
        f"{name}-waterfall-table",
        "Where the time beyond the ideal goes",
        waterfalls,
        [
            *_STEP,
            col("measured", _taken, unit="ms"),
            col("ideal", _ideal_ms, unit="ms"),
            col("ideal / measured", _ideal_share, "percent"),
            *cols(_COLUMNS, lambda traced, title: traced.water.parts[_COLUMNS[title]], unit="ms"),
            col("largest", largest),
            col("what recovers it", recovers),
        ],
        caption="Milliseconds of each part beyond its ideal time; below zero, a part is faster than"
        " its ideal, which happens if a measured ceiling is too low.",
    )
    return keep_columns(full_table, _is_informative)


def _ideal_ms(traced: StepWaterfall) -> Share:
    return at_most(traced.water.ideal_ms, traced.doubt)


def _ideal_share(traced: StepWaterfall) -> Share:
    return at_most(traced.water.ideal_ms / traced.water.measured_ms, traced.doubt)


def _is_informative(column: Column, cells: tuple[Cell, ...]) -> bool:
    """True unless a cause takes no time in any step, or all steps have the same mode."""
    if column.title == "mode":
        return len(set(cells)) > 1
    if column.title in _COLUMNS:
        return not all(isinstance(cell, float) and abs(cell) < 1e-6 for cell in cells)
    return True


def _finding(traced: StepWaterfall) -> Finding:
    water = traced.water
    largest = water.largest()
    lost = water.parts["unattributed"]
    faster = water.faster_ms > _FASTER_FROM * water.measured_ms
    scaled = water.traced_over_timed > _SCALED_FROM
    doubt = abs(lost) > 0.05 * water.measured_ms
    return Finding(
        code="waterfall.ideal",
        values={
            "step": traced.workload.name,
            "ideal_ms": water.ideal_ms,
            "measured_ms": water.measured_ms,
            "largest": largest[0] if largest else None,
            "largest_ms": largest[1] if largest else None,
            "faster_ms": water.faster_ms,
            "traced_over_timed": water.traced_over_timed,
            "unattributed_ms": lost,
        },
        records=(traced.record,) if traced.record else (),
        text=f"{traced.workload.name}: the ideal time of its operations is"
        f" {duration(_ideal_ms(traced))}, {percent(_ideal_share(traced))} of the"
        f" {duration(water.measured_ms)} that it takes."
        f"{''.join(_caveats(traced, faster=faster, scaled=scaled, doubt=doubt))}",
        conclusion=joined(*_conclusions(traced, faster=faster)),
        tone="warn" if doubt or faster or scaled else "info",
    )


def _conclusions(traced: StepWaterfall, *, faster: bool) -> Iterator[Conclusion]:
    water = traced.water
    if largest := water.largest():
        cause, ms = largest
        yield conclude(
            f"The largest recoverable part is {cause}: {duration(ms)},"
            f" {percent(ms / water.measured_ms)}. What recovers it: {remedy(cause, traced)}.",
            traced.shown(ms),
        )
    if faster and not _exceeds(water):
        yield conclude(_TOO_LOW.format(duration(water.faster_ms)), traced.shown(water.faster_ms))


def _exceeds(water: Waterfall) -> bool:
    """Return whether the times of the sentence together exceed the step, which needs the reason
    however small the difference is."""
    _, largest_ms = water.largest() or ("", 0.0)
    return water.ideal_ms + largest_ms > water.measured_ms


def _caveats(traced: StepWaterfall, *, faster: bool, scaled: bool, doubt: bool) -> Iterator[str]:
    water = traced.water
    if faster and _exceeds(water):
        yield f" {_TOO_LOW.format(duration(water.faster_ms))}"
    if traced.doubt and not faster:
        yield f" The ideal is an upper bound: {traced.doubt}."
    if scaled:
        yield (
            f" The traced operations took {number(water.traced_over_timed, 3)} times as long as the"
            " step did without the profiler and are scaled to it: read the parts with care."
        )
    if doubt:
        lost = abs(water.parts["unattributed"])
        yield f" {duration(lost)} are unattributed: read the parts with care."


def remedy(cause: Cause, traced: StepWaterfall) -> str:
    """The change that removes that part, among those that this step does not use yet."""
    w, policy = traced.workload, precision(traced.workload.dtype)
    plain = w.compile == "no" and not w.fused
    passes = f"{'fused kernels or ' * traced.on_device}torch.compile"
    if cause == "matmuls below the ceiling":
        if policy.compute == "float32" and traced.on_device:
            return "a lower-precision dtype: tf32, or bfloat16 autocast"
        lost = traced.water.attention_lost_ms
        if w.attention == "reference" and lost >= 0.5 * traced.water.parts[cause]:
            return "flash attention, which does half of the work under a causal mask"
        others = [
            *(
                ["fused QKV and gate/up projections"]
                if w.compile == "no" and not w.fused_projections
                else []
            ),
            *(
                ["autotuned GEMMs"]
                if w.compile == "no" and not w.autotune_gemms and traced.on_device
                else []
            ),
        ]
        return ", ".join(["larger GEMMs: more tokens in a step", *others])
    if cause == "memory-bound operations":
        model = w.model()
        scores = model.n_layers * model.n_heads * w.context if w.attention == "reference" else 0
        logits = model.vocab if w.loss == "plain" and w.mode != "forward" else 0
        if scores > logits:
            return f"flash attention, which stores no scores; then {passes}"
        if logits and (plain or scores):
            return f"the fused loss, which stores no logits; then {passes}"
        if plain:
            return f"{passes}: fewer passes over the activations"
        if logits:
            return "the fused loss, which stores no logits"
        if policy.autocast and not policy.narrow_stream:
            return "a residual stream in bfloat16: half of the bytes of the norms"
        return "fewer or narrower activations"
    if cause == "casts and copies":
        if policy.autocast:
            return "bfloat16 weights with float32 master weights: nothing is cast in the step"
        return "layouts that the next operation reads without a copy"
    if cause == "launch gaps":
        if w.graph or not traced.on_device:
            return "a larger batch"
        return "fewer launches: a CUDA graph of the step, torch.compile, a larger batch"
    if cause == "optimizer":
        in_one_pass = w.optimizer in ("torch-fused", "stepscope-fused")
        if w.optimizer in WITHIN_BACKWARD or (in_one_pass and not traced.on_device):
            return "a larger batch: the time of an update does not grow with it"
        if in_one_pass:
            return "optimizer-in-backward: stepscope-in-backward"
        return f"AdamW in one pass: {'stepscope-fused or ' * traced.on_device}torch-fused"
    return {
        "recomputation": "checkpointing fewer blocks, as far as memory allows",
        "communication": "communication overlapped with the backward pass, in larger buckets",
        "unattributed": "",
    }[cause]
