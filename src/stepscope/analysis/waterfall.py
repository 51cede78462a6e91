"""Waterfall from the ideal time of a step to the measured one, by part. Parts add up exactly.

Kernel times come from a trace. The profiler slows down the CPU but not the kernels, so the time of
the step without it is the total: if that is shorter than the traced steps, idle time is what
remains after the kernels, and if the kernels alone take longer, as on a machine that was busy in
between, all are scaled down. What took less than its ideal time was compared with a rate that is
too low: its own time is used as the ideal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from stepscope.analysis.ideal import Rates, ideal_ms, operations
from stepscope.analysis.parts import (
    COMMUNICATION,
    COPIES,
    IDEAL,
    IDLE,
    LOADER,
    MATMULS,
    MEMORY,
    OPTIMIZER,
    OUTSIDE,
    RECOMPUTATION,
    SLOW_MATMULS,
    UNATTRIBUTED,
)
from stepscope.analysis.trace.steps import LOADING
from stepscope.analysis.trace.summary import LedgerLine, Summary
from stepscope.analysis.verdict import FASTER, BreakdownPart, Limit, parts_of
from stepscope.model.config import ModelConfig, Precision
from stepscope.model.cost import flops

CAUSES = (
    SLOW_MATMULS,
    MEMORY,
    COPIES,
    IDLE,
    OPTIMIZER,
    RECOMPUTATION,
    COMMUNICATION,
    UNATTRIBUTED,
)
"""Parts of the step of a built-in model beyond its ideal time."""
IDLE_BY = "idle: "
"""Idle time by its cause in the ledger, which follows."""
FASTER_FROM = 0.01
"""Share of the step from which on work that is faster than its ideal time is reported."""
_MATRIX = ("matmul", "attention")
_KINDS = {
    "matmul": ("matmuls", SLOW_MATMULS),
    "attention": ("attention", SLOW_MATMULS),
    "memory": ("other operations", MEMORY),
    "optimizer": ("AdamW", OPTIMIZER),
}
"""Label and part of each kind of ideal time."""
_CORE = "attention/core"
"""Range of attention between its projections."""


class Ideal(NamedTuple):
    """Ideal time of some of the work of a step."""

    label: str
    part: str
    """The part in which the step does this work."""
    ms: float


class Waterfall(NamedTuple):
    """Ideal time, time beyond it by part, and measured time of a step; none is negative."""

    ideal: dict[str, float]
    """Milliseconds by label, at most what the step took for the same work."""
    beyond: dict[str, float]
    """Milliseconds by part; idle time by cause."""
    faster: dict[str, float]
    """Ideal times of the work that took less, by a notable share of the step."""
    measured_ms: float
    update_ms: float
    """Ideal time of the optimizer."""
    traced_over_timed: float = 1.0
    """Time of the traced operations over the step time, if longer; the parts were scaled by it."""
    attention_lost_ms: float = 0.0
    """Time of attention's matmuls beyond their ideal."""

    @property
    def ideal_ms(self) -> float:
        return sum(self.ideal.values())

    @property
    def parts(self) -> dict[str, float]:
        """Milliseconds by part, idle time as one of them."""
        summed: defaultdict[str, float] = defaultdict(float)
        for part, ms in self.beyond.items():
            summed[IDLE if part.startswith(IDLE_BY) else part] += ms
        return summed

    @property
    def faster_ms(self) -> float:
        """Time by which work is faster than its ideal."""
        return sum(ms - self.ideal[label] for label, ms in self.faster.items())

    def largest(self) -> tuple[str, float] | None:
        """Return the recoverable part with the most time, if any is positive."""
        recoverable = {part: ms for part, ms in self.parts.items() if part != UNATTRIBUTED}
        part = max(recoverable, key=lambda name: recoverable[name], default="")
        return (part, recoverable[part]) if recoverable.get(part, 0.0) > 0 else None

    def capped(self, limit: Limit) -> Limit:
        """Return the limit with the times of this waterfall: what a step has done, the hardware can
        do."""
        doubt = limit.doubt or (FASTER if self.faster else "")
        matmul_ms = self.ideal_ms - self.update_ms
        return replace(limit, matmul_ms=matmul_ms, update_ms=self.update_ms, doubt=doubt)

    def breakdown(
        self, limit: Limit | None, names: Mapping[str, str]
    ) -> tuple[Limit | None, tuple[BreakdownPart, ...]]:
        """Return the capped limit, and the parts of a verdict with these names."""
        limit = None if limit is None else self.capped(limit)
        spent = {IDEAL: 0.0 if limit is None else limit.ms} | self.parts
        return limit, parts_of(spent, names)


def spent_in(summary: Summary) -> defaultdict[str, float]:
    """Return the milliseconds of each part in the traced steps."""
    spent: defaultdict[str, float] = defaultdict(float)
    for line in summary.lines:
        if line.kind != "unattributed":
            spent[_part_of(line)] += max(0.0, line.ms)
    return spent


def _part_of(line: LedgerLine) -> str:
    if line.phase == "idle":
        return f"{IDLE_BY}{line.kind}"
    if line.kind == "communication":
        return COMMUNICATION
    if line.phase == "optimizer":
        return OPTIMIZER
    part = _part_of_class(line.kind)
    return OUTSIDE if part == MEMORY and line.phase == "outside" else part


def _part_of_class(kind: str) -> str:
    if kind in _MATRIX:
        return SLOW_MATMULS
    return COPIES if kind == "copy/cast" else MEMORY


def waterfall(
    summary: Summary,
    spent: Mapping[str, float],
    ideal: Sequence[Ideal],
    step_ms: float,
    waited_less_ms: float = 0.0,
) -> Waterfall:
    """Split the time of a step, `spent` by part, into ideal time and time beyond it.

    `waited_less_ms` is the time by which traced steps waited less for their DataLoader.
    """
    idle = sum(ms for part, ms in spent.items() if part.startswith(IDLE_BY))
    busy = sum(spent.values()) - idle
    for_idle = min(1.0, max(0.0, step_ms - busy) / idle) if idle else 1.0
    for_busy = min(1.0, step_ms / busy) if busy else 1.0
    beyond = {
        part: ms * (for_idle if part.startswith(IDLE_BY) else for_busy)
        for part, ms in spent.items()
    }
    rest = max(0.0, step_ms - sum(beyond.values()))
    waited = min(rest, waited_less_ms)
    rest -= waited
    if loading := waited + _idle_in_loader(summary, beyond):
        beyond[LOADER] = loading
    possible, faster, update_ms = {}, {}, 0.0
    for label, part, ms in ideal:
        took = beyond.get(part, 0.0)
        # Time by which the traced steps are shorter than the timed ones may be of any cause.
        possible[label] = min(ms, took + rest)
        beyond[part] = max(0.0, took - possible[label])
        rest -= max(0.0, possible[label] - took)
        update_ms += possible[label] if part == OPTIMIZER else 0.0
        if ms - possible[label] >= FASTER_FROM * step_ms:
            faster[label] = ms
    beyond[UNATTRIBUTED] = max(0.0, rest)
    if SLOW_MATMULS in beyond and not any(one.part == SLOW_MATMULS for one in ideal):
        beyond[MATMULS] = beyond.pop(SLOW_MATMULS)
    return Waterfall(possible, beyond, faster, step_ms, update_ms, 1.0 / (for_busy or 1.0))


def _idle_in_loader(summary: Summary, spent: dict[str, float]) -> float:
    """Move the time in a DataLoader outside of operators from the idle time, and return it. A GPU
    may be busy meanwhile: there its idle time is left as it is."""
    causes = [part for part in spent if part.startswith(IDLE_BY)]
    idle = sum(spent[cause] for cause in causes)
    if summary.on_device or idle <= 0:
        return 0.0
    operators = sum(use.ms for use in summary.uses if use.module.startswith(LOADING))
    moved = min(idle, max(0.0, summary.data_ms - operators))
    for cause in causes:
        spent[cause] *= 1 - moved / idle
    return moved


class Step(NamedTuple):
    """The traced step of a built-in model: model, shape and precision."""

    model: ModelConfig
    batch: int
    context: int
    form: Precision
    mode: str = "train-step"
    again: float = 0.0
    """Average number of times each block's forward pass is recomputed in the backward pass."""


def model_waterfall(
    summary: Summary, step: Step, rates: Rates, measured_ms: float | None = None
) -> Waterfall:
    """Compute the waterfall of a built-in model, whose operations are known."""
    ideal = ideal_ms(operations(step.model, step.batch, step.context, step.form, step.mode), rates)
    spent = spent_in(summary)
    spent[MEMORY] += spent.pop(OUTSIDE, 0.0)
    for part, ms in _recomputed(summary, step).items():
        # Bounded by the ledger: ranges and lines are two views of the same trace.
        again = min(ms, spent[part])
        spent[part] -= again
        spent[RECOMPUTATION] += again
    measured = summary.wall_ms if measured_ms is None else measured_ms
    ideals = [Ideal(*_KINDS[kind], ms) for kind, ms in ideal.items()]
    share = _attention_share(summary, step)
    water = waterfall(summary, spent, ideals, measured)
    attention = share * spent[SLOW_MATMULS] / water.traced_over_timed
    # In this order, as all figures; idle time comes with its causes.
    beyond = {part: 0.0 for part in CAUSES if part != IDLE} | water.beyond
    return water._replace(beyond=beyond, attention_lost_ms=attention - ideal["attention"])


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
    """Time of recomputed blocks by part: their forward pass as it was traced.

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
        times[_part_of_class(use.kind)] += step.again * share * use.ms
    return times
