"""The waterfall of a step as a figure, a table and a finding: lost time by cause, with the change
that recovers it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.analysis.conclusions import Conclusion, conclude, joined
from stepscope.analysis.effects import Effect, part
from stepscope.analysis.limits import rates_doubt, step_rates
from stepscope.analysis.parts import (
    COMMUNICATION,
    COPIES,
    IDLE,
    MEMORY,
    OPTIMIZER,
    RECOMPUTATION,
    SLOW_MATMULS,
    UNATTRIBUTED,
    part_names,
)
from stepscope.analysis.power import Capped, power_capped
from stepscope.analysis.predict.plan import WITHIN_BACKWARD
from stepscope.analysis.trace.summary import Summary
from stepscope.analysis.verdict import MEANINGS, Share, at_most
from stepscope.analysis.waterfall import CAUSES, IDLE_BY, Step, Waterfall, model_waterfall
from stepscope.model.config import ModelConfig, Precision, precision
from stepscope.records.schema import Record
from stepscope.records.stats import Summary as Stats
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Cell, Column, Finding, Table, Timeline
from stepscope.report.format import duration, number, percent
from stepscope.report.tables import Declared, col, cols, keep_columns, table
from stepscope.training.workload import Workload
from stepscope.views.energy import capped_finding
from stepscope.views.figures import bar

_SHORT_NAMES = {MEMORY: "memory-bound", SLOW_MATMULS: "matmuls", IDLE: "idle"}
_COLUMNS = {_SHORT_NAMES.get(cause, cause): cause for cause in CAUSES}
"""Causes by the title of their column."""
_SHOWN_FROM = 0.001
"""Share of the step from which on a part is shown."""
_SCALED_FROM = 1.05

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
    water = model_waterfall(summary, step, rates, timed.median if timed else None)
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
    return figure(
        traced.water,
        name,
        f"From the ideal to the measured step: {traced.workload.name}",
        "A waterfall: each bar starts where the previous one ends. Ideal: for each operation the"
        " longer of its FLOPs at the measured matmul rate and its minimum bytes at the measured"
        " bandwidth. The rest is the time beyond, by part; the parts add up to the measured time.",
    )


def figure(water: Waterfall, name: str, title: str, caption: str) -> Timeline:
    """Bars in which each part begins where the previous one ended."""
    total, at = water.measured_ms, 0.0
    lanes = []
    ideal = {f"ideal: {label}": ms for label, ms in water.ideal.items()}
    for label, ms in (ideal | water.beyond).items():
        if ms >= _SHOWN_FROM * total:
            lanes.append(bar(label, at, ms, total, "ideal" if label in ideal else _meaning(label)))
        at += ms
    lanes.append(bar("measured", 0.0, total, total, "measured"))
    return Timeline(name=name, title=title, lanes=tuple(lanes), x_label="ms", caption=caption)


def _meaning(part: str) -> str:
    """Meaning of a part beyond the ideal; it determines the color."""
    return "idle" if part.startswith(IDLE_BY) else MEANINGS.get(part, "lost")


def _times_table(waterfalls: Sequence[StepWaterfall], name: str) -> Table:
    def largest(traced: StepWaterfall) -> str | None:
        part = traced.water.largest()
        return _named(part[0], traced) if part else None

    def recovers(traced: StepWaterfall) -> str | None:
        part = traced.water.largest()
        return remedy(part[0], traced) if part else None

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
        caption="Milliseconds of each part beyond its ideal time.",
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
    lost = water.parts[UNATTRIBUTED]
    scaled = water.traced_over_timed > _SCALED_FROM
    doubt = lost > 0.05 * water.measured_ms
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
        f"{''.join(_caveats(traced, scaled=scaled, doubt=doubt))}",
        conclusion=joined(*_conclusions(traced)),
        tone="warn" if doubt or water.faster or scaled else "info",
    )


def _conclusions(traced: StepWaterfall) -> Iterator[Conclusion]:
    water = traced.water
    if largest := water.largest():
        cause, ms = largest
        yield conclude(
            f"The largest recoverable part is {_named(cause, traced)}: {duration(ms)},"
            f" {percent(ms / water.measured_ms)}. What recovers it: {remedy(cause, traced)}.",
            traced.shown(ms),
        )
    if water.faster:
        yield conclude(
            f"Some work is faster than its ideal, by {duration(water.faster_ms)}: the rates were"
            " measured too low, perhaps on a busy machine, and its own time is used as the ideal.",
            traced.shown(water.faster_ms),
        )


def _named(cause: str, traced: StepWaterfall) -> str:
    return part_names(on_gpu=traced.on_device).get(cause, cause)


def _caveats(traced: StepWaterfall, *, scaled: bool, doubt: bool) -> Iterator[str]:
    water = traced.water
    if traced.doubt and not water.faster:
        yield f" The ideal is an upper bound: {traced.doubt}."
    if scaled:
        yield (
            f" The traced operations took {number(water.traced_over_timed, 3)} times as long as the"
            " step did without the profiler and are scaled to it: read the parts with care."
        )
    if doubt:
        lost = water.parts[UNATTRIBUTED]
        yield f" {duration(lost)} are unattributed: read the parts with care."


def remedy(cause: str, traced: StepWaterfall) -> str:
    """The change that removes that part, among those that this step does not use yet."""
    w, policy = traced.workload, precision(traced.workload.dtype)
    plain = w.compile == "no" and not w.fused
    passes = f"{'fused kernels or ' * traced.on_device}torch.compile"
    if cause == SLOW_MATMULS:
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
    if cause == MEMORY:
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
    if cause == COPIES:
        if policy.autocast:
            return "bfloat16 weights with float32 master weights: nothing is cast in the step"
        return "layouts that the next operation reads without a copy"
    if cause == IDLE:
        if w.graph or not traced.on_device:
            return "a larger batch"
        return "fewer launches: a CUDA graph of the step, torch.compile, a larger batch"
    if cause == OPTIMIZER:
        in_one_pass = w.optimizer in ("torch-fused", "stepscope-fused")
        if w.optimizer in WITHIN_BACKWARD or (in_one_pass and not traced.on_device):
            return "a larger batch: the time of an update does not grow with it"
        if in_one_pass:
            return "optimizer-in-backward: stepscope-in-backward"
        return f"AdamW in one pass: {'stepscope-fused or ' * traced.on_device}torch-fused"
    return {
        RECOMPUTATION: "checkpointing fewer blocks, as far as memory allows",
        COMMUNICATION: "communication overlapped with the backward pass, in larger buckets",
        UNATTRIBUTED: "",
    }[cause]
