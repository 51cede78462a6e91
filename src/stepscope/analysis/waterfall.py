"""Waterfall from the ideal time of a step to the measured one, by cause. Parts add up exactly.

Kernel times come from a trace. The profiler slows down the CPU but not the kernels, so if the step
was also timed without it, that time is the total, and idle time is what remains after the kernels.
If the kernels take longer than that, as on a machine that was busy in between, all are scaled down:
no part is longer than the step.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal, NamedTuple, get_args

from stepscope.analysis.ideal import Kind, Rates, ideal_ms, operations
from stepscope.analysis.trace.summary import LedgerLine, Summary
from stepscope.model.config import ModelConfig, Precision
from stepscope.model.cost import flops

Cause = Literal[
    "matmuls below the ceiling",
    "memory-bound operations",
    "casts and copies",
    "launch gaps",
    "optimizer",
    "recomputation",
    "communication",
    "unattributed",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
RECOVERABLE: tuple[Cause, ...] = CAUSES[:-1]
_MATRIX = ("matmul", "attention")
_CORE = "attention/core"
"""Range of attention between its projections."""


class Step(NamedTuple):
    """The traced step: model, shape and precision."""

    model: ModelConfig
    batch: int
    context: int
    form: Precision
    mode: str = "train-step"
    again: float = 0.0
    """Average number of times each block's forward pass is recomputed in the backward pass."""


class Waterfall(NamedTuple):
    """Ideal time, parts by cause, and measured time of a step."""

    ideal: dict[Kind, float]
    """Milliseconds by kind: matmul, attention, memory, optimizer."""
    parts: dict[Cause, float]
    """Milliseconds by cause; negative if a part is faster than its ideal."""
    measured_ms: float
    attention_lost_ms: float = 0.0
    """Time of attention's matmuls beyond their ideal; included in "matmuls below the ceiling"."""
    traced_over_timed: float = 1.0
    """Time of the traced operations over the step time, if longer; the parts were scaled by it."""

    @property
    def ideal_ms(self) -> float:
        return sum(self.ideal.values())

    @property
    def faster_ms(self) -> float:
        """Total by which parts are faster than their ideal: the excess of the ideal and all other
        parts over the measured time."""
        return -sum(min(0.0, ms) for ms in self.parts.values())

    def largest(self) -> tuple[Cause, float] | None:
        """Return the recoverable part with the most time, if any is positive."""
        cause = max(RECOVERABLE, key=lambda name: self.parts[name])
        return (cause, self.parts[cause]) if self.parts[cause] > 0 else None


def waterfall(
    summary: Summary, step: Step, rates: Rates, measured_ms: float | None = None
) -> Waterfall:
    """Compute the waterfall; the rates are measured on that machine."""
    ideal = ideal_ms(operations(step.model, step.batch, step.context, step.form, step.mode), rates)
    spent: defaultdict[str, float] = defaultdict(float)
    for line in summary.lines:
        spent[_group(line)] += line.ms
    # Bounded by the ledger: ranges and lines are two views of the same trace.
    recomputed = {group: min(ms, spent[group]) for group, ms in _recomputed(summary, step).items()}
    for group, ms in recomputed.items():
        spent[group] -= ms
    measured = summary.wall_ms if measured_ms is None else measured_ms
    busy = summary.wall_ms - spent["idle"] - spent["unattributed"]
    overrun = busy / measured if 0.0 < measured < busy else 1.0
    if overrun > 1.0:
        busy = measured
        spent = _scaled(spent, 1.0 / overrun)
        recomputed = _scaled(recomputed, 1.0 / overrun)
    gaps = min(max(0.0, measured - busy), spent["idle"])
    parts: dict[Cause, float] = {
        "matmuls below the ceiling": spent["matrix"] - ideal["matmul"] - ideal["attention"],
        "memory-bound operations": spent["memory"] - ideal["memory"],
        "casts and copies": spent["copy/cast"],
        "launch gaps": gaps,
        "optimizer": spent["optimizer"] - ideal["optimizer"],
        "recomputation": sum(recomputed.values(), 0.0),
        "communication": spent["communication"],
        "unattributed": measured - busy - gaps,
    }
    attention = _attention_share(summary, step) * spent["matrix"]
    return Waterfall(ideal, parts, measured, attention - ideal["attention"], overrun)


def _scaled(times: dict[str, float], factor: float) -> defaultdict[str, float]:
    return defaultdict(float, {name: ms * factor for name, ms in times.items()})


def _group(line: LedgerLine) -> str:
    if line.phase == "idle":
        return "idle"
    if line.kind in ("unattributed", "communication"):
        return line.kind
    if line.phase == "optimizer":
        return "optimizer"
    return _group_of_class(line.kind)


def _group_of_class(kind: str) -> str:
    if kind in _MATRIX:
        return "matrix"
    return kind if kind == "copy/cast" else "memory"


def _attention_share(summary: Summary, step: Step) -> float:
    """Attention's share of the matmul time.

    If no range names attention, its share of the FLOPs is used, including the masked half that
    naive attention computes.
    """
    matmuls = [use for use in summary.uses if use.kind in _MATRIX]
    own = sum(use.ms for use in matmuls if _CORE in use.module)
    if own:
        return own / sum(use.ms for use in matmuls)
    counted = flops(step.model, step.batch, step.context)
    naive = 2 * counted.forward_attention
    return naive / (counted.forward_linear + naive)


def _recomputed(summary: Summary, step: Step) -> dict[str, float]:
    """Time of recomputed blocks by group: their forward pass as it was traced.

    If no range names the blocks (compiled models have none), their share of the forward pass's
    FLOPs is used.
    """
    times: dict[str, float] = defaultdict(float)
    if not step.again or step.mode == "forward":
        return times
    own = [use for use in summary.uses if use.phase == "forward"]
    blocks = [use for use in own if use.module.startswith("block")]
    total = flops(step.model, step.batch, step.context).forward
    head = 2 * step.batch * step.context * step.model.d_model * step.model.vocab
    share = 1.0 if blocks else 1.0 - head / total
    for use in blocks or own:
        times[_group_of_class(use.kind)] += step.again * share * use.ms
    return times
