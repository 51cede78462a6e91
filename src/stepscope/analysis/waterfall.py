"""From the ideal time of a step up to the measured one, by cause. Parts add up exactly.

Times of kernels come from a trace. The profiler makes the host slower and leaves kernels as they
are, so where the step was also timed without it, that time is the total, and idle time is what the
kernels leave of it. Where they take longer than that, as on a machine that was busy in between, all
are scaled to it: no part is longer than the step.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal, NamedTuple

from stepscope.analysis.ideal import Kind, ideal_ms, operations
from stepscope.analysis.trace.summary import Line, Summary
from stepscope.model.config import ModelConfig, Precision
from stepscope.model.cost import flops

Cause = Literal[
    "matmuls below peak", "memory-bound operations", "casts and copies", "launch gaps",
    "optimizer", "recomputation", "communication", "unattributed",
]  # fmt: skip
CAUSES: tuple[Cause, ...] = (
    "matmuls below peak", "memory-bound operations", "casts and copies", "launch gaps",
    "optimizer", "recomputation", "communication", "unattributed",
)  # fmt: skip
RECOVERABLE: tuple[Cause, ...] = CAUSES[:-1]
_MATRIX = ("matmul", "attention")
_CORE = "attention/core"
"""The range of attention between its projections."""


class Step(NamedTuple):
    """What was traced: a step of this model in this format."""

    model: ModelConfig
    batch: int
    context: int
    form: Precision
    mode: str = "train-step"
    again: float = 0.0
    """How often each block's forward runs again in the backward, on average."""


class Waterfall(NamedTuple):
    ideal: dict[Kind, float]
    """Milliseconds by kind: matmul, attention, memory, optimizer."""
    parts: dict[Cause, float]
    """Milliseconds by cause; below zero where a part is faster than its ideal."""
    measured_ms: float
    attention_lost_ms: float = 0.0
    """What attention's products take beyond their ideal: of the matmuls below peak."""
    traced_over_timed: float = 1.0
    """Time of the traced operations over that of the step, where it was longer and was scaled."""

    @property
    def ideal_ms(self) -> float:
        return sum(self.ideal.values())

    @property
    def faster_ms(self) -> float:
        """By how much parts are faster than their ideal: what the ideal and all other parts come to
        beyond the measured time."""
        return -sum(min(0.0, ms) for ms in self.parts.values())

    def largest(self) -> tuple[Cause, float] | None:
        """The recoverable part with the most time, if any has some."""
        cause = max(RECOVERABLE, key=lambda one: self.parts[one])
        return (cause, self.parts[cause]) if self.parts[cause] > 0 else None


def waterfall(
    summary: Summary, step: Step, rate: float, bandwidth: float, measured_ms: float | None = None
) -> Waterfall:
    """`rate` in FLOP/s of the step's format and `bandwidth` in B/s, as measured on that machine."""
    ideal = ideal_ms(
        operations(step.model, step.batch, step.context, step.form, step.mode), rate, bandwidth
    )
    spent: defaultdict[str, float] = defaultdict(float)
    for line in summary.lines:
        spent[_group(line)] += line.ms
    # No more than the ledger has: ranges and lines are two accounts of the same trace.
    again = {group: min(ms, spent[group]) for group, ms in _run_again(summary, step).items()}
    for group, ms in again.items():
        spent[group] -= ms
    measured = summary.wall_ms if measured_ms is None else measured_ms
    busy = summary.wall_ms - spent["idle"] - spent["residual"]
    longer = busy / measured if 0.0 < measured < busy else 1.0
    if longer > 1.0:
        busy = measured
        spent = _scaled(spent, 1.0 / longer)
        again = _scaled(again, 1.0 / longer)
    gaps = min(max(0.0, measured - busy), spent["idle"])
    parts: dict[Cause, float] = {
        "matmuls below peak": spent["matrix"] - ideal["matmul"] - ideal["attention"],
        "memory-bound operations": spent["memory"] - ideal["memory"],
        "casts and copies": spent["copy/cast"],
        "launch gaps": gaps,
        "optimizer": spent["optimizer"] - ideal["optimizer"],
        "recomputation": sum(again.values(), 0.0),
        "communication": spent["communication"],
        "unattributed": measured - busy - gaps,
    }
    attention = _attention_share(summary, step) * spent["matrix"]
    return Waterfall(ideal, parts, measured, attention - ideal["attention"], longer)


def _scaled(times: dict[str, float], factor: float) -> defaultdict[str, float]:
    return defaultdict(float, {name: ms * factor for name, ms in times.items()})


def _group(line: Line) -> str:
    if line.phase == "idle":
        return "idle"
    if line.kind in ("residual", "communication"):
        return line.kind
    if line.phase == "optimizer":
        return "optimizer"
    return _group_of_class(line.kind)


def _group_of_class(kind: str) -> str:
    if kind in _MATRIX:
        return "matrix"
    return kind if kind == "copy/cast" else "memory"


def _attention_share(summary: Summary, step: Step) -> float:
    """Of the time of all products. Where no range names attention's, its share of the arithmetic
    stands for it, with the masked half, as attention that is written out does it."""
    products = [use for use in summary.uses if use.kind in _MATRIX]
    own = sum(use.ms for use in products if _CORE in use.module)
    if own:
        return own / sum(use.ms for use in products)
    counted = flops(step.model, step.batch, step.context)
    written_out = 2 * counted.forward_attention
    return written_out / (counted.forward_linear + written_out)


def _run_again(summary: Summary, step: Step) -> dict[str, float]:
    """What blocks that run again take: their forward as it was traced, by group.

    Where no range names the blocks (compiled models have none), their share of the forward's
    arithmetic stands for them.
    """
    held: dict[str, float] = defaultdict(float)
    if not step.again or step.mode == "forward":
        return held
    own = [use for use in summary.uses if use.phase == "forward"]
    blocks = [use for use in own if use.module.startswith("block")]
    whole = flops(step.model, step.batch, step.context).forward
    head = 2 * step.batch * step.context * step.model.d_model * step.model.vocab
    share = 1.0 if blocks else 1.0 - head / whole
    for use in blocks or own:
        held[_group_of_class(use.kind)] += step.again * share * use.ms
    return held
