"""Tables and the Pareto figure of the checkpointing study."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.model.checkpointing import NONE
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Cell, Column, Curve, Figure, Kind, Table
from stepscope.studies.checkpointing.findings import checkpointing_findings
from stepscope.studies.checkpointing.rows import Sweep, Tried, sweeps

_BYTES: Kind = "bytes"
_GIB = 2**30
_STATUS = {"oom": "OOM"}


def checkpointing_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    found = sweeps(records)
    return (
        *checkpointing_findings(found),
        *(_pareto(number, sweep) for number, sweep in enumerate(found) if len(sweep.ran) > 1),
        *(_table(number, sweep) for number, sweep in enumerate(found)),
    )


def _pareto(place: int, sweep: Sweep) -> Figure:
    unit, name = (_GIB, "GiB") if max(e.peak for e in sweep.ran) >= _GIB else (2**20, "MiB")

    def curve(label: str, members: Sequence[Tried]) -> Curve:
        return Curve(
            label=label,
            x=tuple(each.peak / unit for each in members),
            y=tuple(each.ms or 0.0 for each in members),
        )

    simple = sorted(
        (e for e in sweep.ran if e.strategy != NONE and len(e.sizes) == 1), key=lambda e: e.sizes
    )
    others = [each for each in sweep.ran if each not in simple]
    ends = dict.fromkeys(each.strategy for each in (*simple[:1], *simple[-1:]))
    named = f"stretches of {' to '.join(ends)}"
    return Figure(
        name=f"checkpointing-pareto{_suffix(place)}",
        title=f"Memory against time: {sweep.name}",
        kind="lines",
        curves=(
            *([curve(named, simple)] if simple else []),
            *(curve(_label(each), [each]) for each in others),
            curve("Pareto front", sweep.front),
        ),
        x_label=f"peak memory, {name}",
        y_label="step, ms",
        caption="Each point is a strategy; the front joins those that no other one beats in both.",
    )


def _label(each: Tried) -> str:
    return "no checkpointing" if each.strategy == NONE else each.strategy


def _suffix(place: int) -> str:
    return f"-{place + 1}" if place else ""


def _table(place: int, sweep: Sweep) -> Table:
    best = {each.strategy for each in sweep.front}

    def row(each: Tried) -> tuple[Cell, ...]:
        facts: tuple[Cell, ...] = (
            "no" if each.strategy == NONE else "-".join(map(str, each.sizes)),
            each.inputs,
            each.again,
            each.budget,
        )
        if not each.ok:
            status = _STATUS.get(each.record.status, each.record.status)
            return (each.strategy, *facts, status, *(None,) * 9)
        quantity = each.record.quantity
        return (
            each.strategy,
            *facts,
            each.peak,
            each.predicted,
            each.off,
            each.peak_phase,
            quantity("peak_bytes", phase="loss"),
            quantity("peak_bytes", phase="backward"),
            each.ms,
            sweep.slower(each),
            sweep.predicted_slower(each),
            "yes" if each.strategy in best and each.budget is None else "",
        )

    return Table(
        name=f"checkpointing-strategies{_suffix(place)}",
        title=f"Every strategy: {sweep.name}",
        columns=(
            Column(title="strategy"),
            Column(title="stretches", hint="blocks in a stretch of each level, outermost first"),
            Column(title="inputs kept", kind="count", hint="of stretches, at most at one time"),
            Column(
                title="run again", kind="number", hint="forwards of a block in the backward, mean"
            ),
            Column(title="budget", kind=_BYTES, hint="limit that it ran under"),
            Column(title="peak", kind=_BYTES),
            Column(title="predicted", kind=_BYTES, hint="from the configuration alone"),
            Column(title="off", kind="percent", hint="predicted over measured, less one"),
            Column(title="in phase"),
            Column(title="peak of loss", kind=_BYTES, hint="all that is kept, no gradient yet"),
            Column(title="peak of backward", kind=_BYTES),
            Column(title="step", kind="number", unit="ms", hint="median"),
            Column(title="× without", kind="number", hint="step with all activations kept"),
            Column(
                title="× predicted",
                kind="number",
                hint="1 + forwards run again × the forward's share of the step without",
            ),
            Column(
                title="on the front",
                hint="no other has a shorter step and a peak that is lower or higher by 0.5 % only",
            ),
        ),
        rows=tuple(row(each) for each in (*sweep.all, *sweep.budgets)),
        caption="On CUDA `max_memory_allocated`, on a CPU the bytes of all tensors that live.",
    )
