"""Findings, Pareto figure and tables of the checkpointing study. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from stepscope.analysis.conclusions import NOTHING, conclude
from stepscope.analysis.effects import Effect, quotient
from stepscope.analysis.limits import median_ms, step_ms
from stepscope.model.checkpointing import (
    NESTED,
    NONE,
    recomputed_blocks,
    saved_inputs,
    segment_sizes,
)
from stepscope.report.blocks import Block, Curve, Figure, Finding, Table, Value
from stepscope.report.format import bytes_, counted, duration, number, percent
from stepscope.report.tables import col, table
from stepscope.studies.base import Result
from stepscope.studies.checkpointing.cases import CheckpointingCase
from stepscope.views.builders import curve, finding, grouped, suffix

_GIB = 2**30
_SAME = 0.01
"""Relative difference up to which a finding calls two peaks the same."""
_SAME_PEAK = 0.005
"""Relative difference for the Pareto front: what the allocator's blocks may add."""


class StrategyRun:
    """One strategy of a sweep, run or not."""

    def __init__(self, result: Result[CheckpointingCase]) -> None:
        self.record, self.case = result
        self.strategy = self.case.checkpoint
        self.layers = int(self.record.quantity("blocks") or self.case.layers)
        self.sizes = segment_sizes(self.strategy, self.layers)
        self.inputs = saved_inputs(self.sizes, self.layers)
        self.again = recomputed_blocks(self.sizes, self.layers) / self.layers
        """Average number of recomputed forward passes per block."""
        self.ok = self.record.status == "ok"
        self.peak = self.record.quantity("peak_bytes") or 0.0
        self.predicted = self.record.quantity("predicted_bytes")
        self.off = self.predicted / self.peak - 1 if self.predicted and self.peak else None
        self.step = step_ms(self.record)
        self.ms = self.step.median if self.step else None
        forward = median_ms(self.record, "forward")
        self.forward_share = forward / self.ms if forward and self.ms else None
        """Share of the forward pass in the step; None in records without phases."""

    def slower_than(self, other: StrategyRun) -> Effect:
        """Step time over that of another strategy."""
        assert self.step is not None
        assert other.step is not None
        return quotient(self.step, other.step)

    def peak_of(self, phase: str) -> float | None:
        return self.record.quantity("peak_bytes", phase=phase)

    @property
    def peak_phase(self) -> str:
        phases = [
            (quantity.value, quantity.phase)
            for quantity in self.record.quantities
            if quantity.name == "peak_bytes" and quantity.phase
        ]
        return max(phases)[1] if phases else ""

    @property
    def words(self) -> str:
        return "no checkpointing" if self.strategy == NONE else f"checkpointing {self.strategy}"


class Sweep:
    """All strategies of one step."""

    def __init__(self, members: Sequence[StrategyRun]) -> None:
        self.all = members
        self.ran = [each for each in self.all if each.ok and each.ms is not None]
        self.name = _plain(members[0].case).name
        self.baseline = self.of(NONE)

    def of(self, strategy: str) -> StrategyRun | None:
        return next((each for each in self.ran if each.strategy == strategy), None)

    def slower(self, each: StrategyRun) -> float | None:
        """Step time relative to no checkpointing."""
        return (
            each.ms / self.baseline.ms if self.baseline and self.baseline.ms and each.ms else None
        )

    def predicted_slower(self, each: StrategyRun) -> float | None:
        """Expected step time relative to no checkpointing: the recomputed forward passes, at the
        forward pass's share of the step without checkpointing."""
        share = self.baseline.forward_share if self.baseline else None
        return None if share is None else 1 + each.again * share

    @property
    def front(self) -> list[StrategyRun]:
        """The Pareto front: strategies that no other one beats in both, by peak."""
        front = (e for e in self.ran if not any(_beats(other, e) for other in self.ran))
        return sorted(front, key=lambda each: each.peak)


def _beats(one: StrategyRun, other: StrategyRun) -> bool:
    """True for a shorter step with no more memory, or less memory with no longer step."""
    ms, longer = one.ms or 0.0, other.ms or 0.0
    return (ms < longer and one.peak <= other.peak * (1 + _SAME_PEAK)) or (
        ms == longer and one.peak < other.peak
    )


def _plain(case: CheckpointingCase) -> CheckpointingCase:
    return msgspec.structs.replace(case, checkpoint=NONE)


def sweeps(results: Sequence[Result[CheckpointingCase]]) -> list[Sweep]:
    groups = grouped(results, lambda result: _plain(result.case).key)
    return [Sweep([StrategyRun(result) for result in members]) for members in groups.values()]


def view(results: Sequence[Result[CheckpointingCase]]) -> tuple[Block, ...]:
    all_sweeps = sweeps(results)
    return (
        *(finding for sweep in all_sweeps for finding in _saving(sweep)),
        *(finding for sweep in all_sweeps for finding in _neighbors(sweep)),
        *(finding for sweep in all_sweeps for finding in _nested(sweep)),
        *(_pareto(index, sweep) for index, sweep in enumerate(all_sweeps) if len(sweep.ran) > 1),
        *(_table(index, sweep) for index, sweep in enumerate(all_sweeps)),
    )


def _saving(sweep: Sweep) -> Iterator[Finding]:
    """The smallest peak of the simple strategies against no checkpointing."""
    simple = [each for each in sweep.ran if len(each.sizes) == 1]
    if not simple:
        return
    least = min(simple, key=lambda each: each.peak)
    words = "each block alone" if least.strategy == "1" else f"segments of {least.strategy} blocks"
    text = f"{sweep.name}: of the simple strategies {words} needs the least,"
    if len(simple) == 1:
        text = f"{sweep.name}: {words} needs"
    values: dict[str, Value] = {
        "step": sweep.name,
        "strategy": least.strategy,
        "peak": least.peak,
        "ms": least.ms,
    }
    baseline = sweep.baseline
    if baseline is None:
        planned = [each for each in sweep.all if each.strategy == NONE]
        status = planned[0].record.status if planned else ""
        without = {"oom": "ran out of memory", "": "was not tried"}.get(status, "did not run")
        yield finding(
            "checkpointing.least-memory",
            f"{text} {bytes_(least.peak)} and {duration(least.ms or 0)} a step; without"
            f" checkpointing it {without}.",
            [*simple, *planned],
            values | {"without": without},
            tone="good",
        )
        return
    effect = least.slower_than(baseline)
    slower = effect.value
    expected = sweep.predicted_slower(least)
    values |= {"kept_peak": baseline.peak, "kept_ms": baseline.ms, "slower": slower}
    text += (
        f" {bytes_(least.peak)} instead of {bytes_(baseline.peak)}, and takes"
        f" {duration(least.ms or 0)} instead of {duration(baseline.ms or 0)}, {number(slower, 3)}×"
        " the time"
    )
    if slower < 1:
        yield finding(
            "checkpointing.impossible-time",
            f"{text} although it does more work: its times are not usable.",
            [*simple, baseline],
            values,
            conclusion=conclude("The machine was busy with something else.", effect),
            tone="warn",
        )
        return
    if expected is None:
        text += (
            f"; one more forward pass is {number(4 / 3, 3)}× if the forward pass is a third of the"
            " step and the optimizer costs nothing"
        )
    else:
        text += (
            f" ({number(expected, 3)}× predicted, as the forward pass is"
            f" {percent(baseline.forward_share or 0)} of the step)"
        )
    yield finding(
        "checkpointing.saving",
        f"{text}.",
        [*simple, baseline],
        values | {"predicted_slower": expected, "forward_share": baseline.forward_share},
        tone="good" if least.peak < baseline.peak else "info",
    )


def _neighbors(sweep: Sweep) -> Iterator[Finding]:
    """The peak of the best segment size next to those of the sizes around it."""
    sized = sorted(
        (each for each in sweep.ran if len(each.sizes) == 1 and each.sizes[0]),
        key=lambda each: each.sizes[0],
    )
    if len(sized) < 2:
        return
    best = min(range(len(sized)), key=lambda index: sized[index].peak)
    near = sized[max(0, best - 1) : best + 2]
    listed = ", ".join(
        f"{bytes_(each.peak)} with segments of {counted(each.sizes[0], 'block')}" for each in near
    )
    edge = "; there is no smaller segment" if best == 0 else ""
    yield finding(
        "checkpointing.neighbors",
        f"{sweep.name}, one recomputation at most: {listed}{edge}.",
        near,
        {f"segments of {each.sizes[0]}": each.peak for each in near},
        timed=False,
    )


def _nested(sweep: Sweep) -> Iterator[Finding]:
    """The strategy with the fewest saved inputs, its cost, and its effect on the peak."""
    halved, single = sweep.of(NESTED), sweep.of("1")
    if halved is None or single is None:
        return
    layers = halved.layers
    to_two = tuple(range(layers - 1, 0, -1))
    fewest, most_again = saved_inputs(to_two, layers), recomputed_blocks(to_two, layers) / layers
    same = abs(halved.peak / single.peak - 1) <= _SAME
    cost = halved.slower_than(single)
    text = (
        f"{sweep.name}: the strategy with the fewest saved inputs is nested, {layers} blocks halved"
        f" down to single ones ({'-'.join(map(str, halved.sizes))}): at most {halved.inputs} inputs"
        f" instead of {single.inputs}, growing with the logarithm of the depth, for"
        f" {number(halved.again, 3)} recomputed forward passes per block instead of one;"
        f" {duration(halved.ms or 0)} against {duration(single.ms or 0)} a step."
    )
    text += (
        f" The peak of the step stays at {bytes_(halved.peak)}: it is in the"
        f" {halved.peak_phase} phase, when all gradients and one block's activations are live and"
        " few inputs are left."
        if same
        else f" Peak {bytes_(halved.peak)} against {bytes_(single.peak)}."
    )
    if layers > 2:
        text += (
            f" As few as {fewest} inputs are possible, splitting off one block at"
            f" a time, for {number(most_again, 3)} forward passes per block."
        )
    yield finding(
        "checkpointing.nested",
        text,
        [halved, single],
        {
            "step": sweep.name,
            "layers": layers,
            "inputs": halved.inputs,
            "single_inputs": single.inputs,
            "again": halved.again,
            "ms": halved.ms,
            "single_ms": single.ms,
            "peak": halved.peak,
            "single_peak": single.peak,
            "peak_phase": halved.peak_phase,
            "fewest_inputs": fewest,
            "most_again": most_again,
        },
        conclusion=conclude("Single blocks are as good and cheaper.", cost)
        if same and cost.value > 1
        else NOTHING,
    )


def _pareto(index: int, sweep: Sweep) -> Figure:
    unit, name = (_GIB, "GiB") if max(e.peak for e in sweep.ran) >= _GIB else (2**20, "MiB")

    def plotted(label: str, members: Sequence[StrategyRun]) -> Curve:
        return curve(label, ((each.peak / unit, each.ms or 0.0) for each in members))

    simple = sorted(
        (e for e in sweep.ran if e.strategy != NONE and len(e.sizes) == 1), key=lambda e: e.sizes
    )
    others = [each for each in sweep.ran if each not in simple]
    ends = dict.fromkeys(each.strategy for each in (*simple[:1], *simple[-1:]))
    return Figure(
        name=f"checkpointing-pareto{suffix(index)}",
        title=f"Memory against time: {sweep.name}",
        curves=(
            *([plotted(f"segments of {' to '.join(ends)}", simple)] if simple else []),
            *(plotted(each.words.removeprefix("checkpointing "), [each]) for each in others),
            plotted("Pareto front", sweep.front),
        ),
        x_label=f"peak memory, {name}",
        y_label="step, ms",
        caption="Each point is a strategy; the front connects those that none beats in both.",
    )


def _table(index: int, sweep: Sweep) -> Table:
    best = {each.strategy for each in sweep.front}
    columns = [
        col("strategy", lambda e: e.strategy, key=True),
        col(
            "segments",
            lambda e: "no" if e.strategy == NONE else "-".join(map(str, e.sizes)),
            hint="blocks per segment at each level, outermost first",
            key=True,
        ),
        col("saved inputs", lambda e: e.inputs, "count", key=True, hint="of segments, at most"),
        col("recomputed", lambda e: e.again, "number", key=True, hint="forward passes per block"),
        col("peak", lambda e: e.peak, "bytes"),
        col("predicted", lambda e: e.predicted, "bytes", hint="from the configuration alone"),
        col("off", lambda e: e.off, "percent", hint="predicted over measured, minus one"),
        col("in phase", lambda e: e.peak_phase),
        col("peak of loss", lambda e: e.peak_of("loss"), "bytes", hint="no gradient yet"),
        col("peak of backward", lambda e: e.peak_of("backward"), "bytes"),
        col("step", lambda e: e.ms, unit="ms", hint="median"),
        col("× without", sweep.slower, "number", hint="relative to no checkpointing"),
        col(
            "× predicted",
            sweep.predicted_slower,
            "number",
            hint="1 + recomputed forward passes × their share of the step without checkpointing",
        ),
        col(
            "on the front",
            lambda e: "yes" if e.strategy in best else "",
            hint="no other has a shorter step and a peak that is lower or higher by 0.5 % only",
        ),
    ]
    return table(
        f"checkpointing-strategies{suffix(index)}",
        f"Every strategy: {sweep.name}",
        sweep.all,
        columns,
        caption="On CUDA: `max_memory_allocated`; on a CPU: the bytes of all live tensors.",
    )
