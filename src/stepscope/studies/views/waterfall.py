"""The waterfall of a step as a figure, a table and a finding: lost time by cause, with the change
that recovers it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.analysis.limits import matrix_ceiling, median_ms
from stepscope.analysis.power import Capped, power_capped
from stepscope.analysis.trace.summary import Summary
from stepscope.analysis.waterfall import CAUSES, Cause, Step, Waterfall, waterfall
from stepscope.model.config import ModelConfig, Precision, precision
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Cell, Column, Finding, Table, Timeline
from stepscope.report.format import duration, number, percent
from stepscope.report.tables import Declared, col, cols, keep_columns, table
from stepscope.studies.training.flags import WITHIN_BACKWARD
from stepscope.studies.training.workload import Workload
from stepscope.studies.views.energy import capped_finding
from stepscope.studies.views.figures import bar

_SHORT_NAMES = {"memory-bound operations": "memory-bound", "matmuls below the ceiling": "matmuls"}
_COLUMNS: dict[str, Cause] = {_SHORT_NAMES.get(cause, cause): cause for cause in CAUSES}
"""Causes by the title of their column."""
_FASTER_FROM = 0.01
_SCALED_FROM = 1.05
_KINDS = {
    "matmul": "matmuls",
    "attention": "attention",
    "memory": "other operations",
    "optimizer": "AdamW",
}

_STEP: list[Declared] = [
    col("step", lambda fall: fall.workload.name),
    col("mode", lambda fall: fall.workload.mode),
]


class Fall(NamedTuple):
    """The waterfall of one traced step."""

    workload: Workload
    water: Waterfall
    on_device: bool
    capped: Capped | None = None
    record: str = ""
    """The id of its record."""


def fall_of(record: Record, workload: Workload, summary: Summary) -> Fall | None:
    """The waterfall of a record; None without the ceilings that an ideal time needs, or for a
    user's model. If the same kernels were replayed as a CUDA graph, the total is that time."""
    model = workload.shape
    if model is None:
        return None
    rate, bandwidth = matrix_ceiling(record), record.ceiling("memory.copy")
    if rate is None or bandwidth is None or rate.value <= 0 or bandwidth.value <= 0:
        return None
    step = waterfall_step(workload, model, precision(workload.dtype))
    timed = median_ms(record, "replay") or median_ms(record, "step")
    water = waterfall(summary, step, rate.value, bandwidth.value, timed)
    return Fall(workload, water, summary.on_device, power_capped(record), record.id)


def waterfall_step(workload: Workload, model: ModelConfig, policy: Precision) -> Step:
    """The step whose ideal time a waterfall starts from."""
    w = workload
    return Step(model, w.batch, w.context, policy, w.mode, w.run_again())


def waterfall_blocks(falls: Sequence[Fall], name: str) -> tuple[Block, ...]:
    """A table of all; figures and findings of the slowest and of the fastest with its task."""
    if not falls:
        return ()
    shown = _slowest_and_fastest(falls)
    capped = {fall.workload.name: fall.capped for fall in falls if fall.capped}
    return (
        *(_finding(fall) for fall in shown),
        *capped_finding(capped, tuple(fall.record for fall in falls if fall.capped)),
        *(
            waterfall_figure(fall, f"{name}-waterfall" + (f"-{index}" if index > 1 else ""))
            for index, fall in enumerate(shown, start=1)
        ),
        _times_table(falls, name),
        _shares_table(falls, name),
    )


def _slowest_and_fastest(falls: Sequence[Fall]) -> list[Fall]:
    """The slowest, and the fastest with the same task, or the fastest of all if it is alone."""
    slowest = max(falls, key=_taken)
    others = [fall for fall in falls if fall is not slowest]
    same = [fall for fall in others if _task(fall.workload) == _task(slowest.workload)]
    return [slowest, min(same or others, key=_taken)] if others else [slowest]


def _taken(fall: Fall) -> float:
    return fall.water.measured_ms


def _task(w: Workload) -> tuple[object, ...]:
    return w.table, w.size, w.overrides, w.context, w.batch, w.mode


def waterfall_figure(fall: Fall, name: str) -> Timeline:
    """Bars in which each cause begins where the previous one ended."""
    water, total = fall.water, fall.water.measured_ms
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
        title=f"From the ideal to the measured step: {fall.workload.name}",
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


def _shares_table(falls: Sequence[Fall], name: str) -> Table:
    def share(fall: Fall, title: str) -> float:
        return fall.water.parts[_COLUMNS[title]] / fall.water.measured_ms

    full_table = table(
        f"{name}-waterfall-shares",
        "The same as shares of the measured time",
        falls,
        [
            *_STEP,
            col("ideal", _ideal_share, "percent"),
            *cols(_COLUMNS, share, "percent"),
        ],
    )
    return keep_columns(full_table, _is_informative)


def _times_table(falls: Sequence[Fall], name: str) -> Table:
    def largest(fall: Fall) -> Cause | None:
        part = fall.water.largest()
        return part[0] if part else None

    def recovers(fall: Fall) -> str | None:
        cause = largest(fall)
        return remedy(cause, fall) if cause else None

    full_table = table(
        f"{name}-waterfall-table",
        "Where the time beyond the ideal goes",
        falls,
        [
            *_STEP,
            col("measured", _taken, unit="ms"),
            col("ideal", lambda fall: fall.water.ideal_ms, unit="ms"),
            col("ideal / measured", _ideal_share, "percent"),
            *cols(_COLUMNS, lambda fall, title: fall.water.parts[_COLUMNS[title]], unit="ms"),
            col("largest", largest),
            col("what recovers it", recovers),
        ],
        caption="Milliseconds of each part beyond its ideal time; below zero, a part is faster than"
        " its ideal, which happens if a measured ceiling is too low.",
    )
    return keep_columns(full_table, _is_informative)


def _ideal_share(fall: Fall) -> float:
    return fall.water.ideal_ms / fall.water.measured_ms


def _is_informative(column: Column, cells: tuple[Cell, ...]) -> bool:
    """True unless a cause takes no time in any step, or all steps have the same mode."""
    if column.title == "mode":
        return len(set(cells)) > 1
    if column.title in _COLUMNS:
        return not all(isinstance(cell, float) and abs(cell) < 1e-6 for cell in cells)
    return True


def _finding(fall: Fall) -> Finding:
    water = fall.water
    largest = water.largest()
    lost = water.parts["unattributed"]
    faster = water.faster_ms > _FASTER_FROM * water.measured_ms
    scaled = water.traced_over_timed > _SCALED_FROM
    doubt = abs(lost) > 0.05 * water.measured_ms
    return Finding(
        code="waterfall.ideal",
        values={
            "step": fall.workload.name,
            "ideal_ms": water.ideal_ms,
            "measured_ms": water.measured_ms,
            "largest": largest[0] if largest else None,
            "largest_ms": largest[1] if largest else None,
            "faster_ms": water.faster_ms,
            "traced_over_timed": water.traced_over_timed,
            "unattributed_ms": lost,
        },
        records=(fall.record,) if fall.record else (),
        text=f"{fall.workload.name}: the ideal time of its operations is"
        f" {duration(water.ideal_ms)}, {percent(_ideal_share(fall))} of the"
        f" {duration(water.measured_ms)} that it takes.",
        conclusion=" ".join(_conclusions(fall, faster=faster, scaled=scaled, doubt=doubt)),
        tone="warn" if doubt or faster or scaled else "info",
    )


def _conclusions(fall: Fall, *, faster: bool, scaled: bool, doubt: bool) -> Iterator[str]:
    water = fall.water
    if largest := water.largest():
        cause, ms = largest
        yield (
            f"The largest recoverable part is {cause}: {duration(ms)},"
            f" {percent(ms / water.measured_ms)}. What recovers it: {remedy(cause, fall)}."
        )
    if faster:
        yield (
            f"Some parts are faster than their ideal, by {duration(water.faster_ms)}: the rates"
            " were measured too low, perhaps on a busy machine, so the ideal and the parts beyond"
            " it exceed the step."
        )
    if scaled:
        yield (
            f"The traced operations took {number(water.traced_over_timed, 3)} times as long as the"
            " step did without the profiler and are scaled to it, so read the parts with care."
        )
    if doubt:
        lost = abs(water.parts["unattributed"])
        yield f"{duration(lost)} have no cause, so read the parts with care."


def remedy(cause: Cause, fall: Fall) -> str:
    """The change that removes that part, among those that this step does not use yet."""
    w, policy = fall.workload, precision(fall.workload.dtype)
    plain = w.compile == "no" and not w.fused
    passes = f"{'fused kernels or ' * fall.on_device}torch.compile"
    if cause == "matmuls below the ceiling":
        if policy.compute == "float32" and fall.on_device:
            return "a lower-precision dtype: tf32, or bfloat16 autocast"
        lost = fall.water.attention_lost_ms
        if w.attention == "reference" and lost >= 0.5 * fall.water.parts[cause]:
            return "flash attention, which does half of the work under a causal mask"
        others = [
            *(
                ["fused QKV and gate/up projections"]
                if w.compile == "no" and not w.fused_projections
                else []
            ),
            *(
                ["autotuned GEMMs"]
                if w.compile == "no" and not w.autotune_gemms and fall.on_device
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
        if w.graph or not fall.on_device:
            return "a larger batch"
        return "fewer launches: a CUDA graph of the step, torch.compile, a larger batch"
    if cause == "optimizer":
        in_one_pass = w.optimizer in ("torch-fused", "stepscope-fused")
        if w.optimizer in WITHIN_BACKWARD or (in_one_pass and not fall.on_device):
            return "a larger batch: the time of an update does not grow with it"
        if in_one_pass:
            return "optimizer-in-backward: stepscope-in-backward"
        return f"AdamW in one pass: {'stepscope-fused or ' * fall.on_device}torch-fused"
    return {
        "recomputation": "checkpointing fewer blocks, as far as memory allows",
        "communication": "communication overlapped with the backward pass, in larger buckets",
        "unattributed": "",
    }[cause]
