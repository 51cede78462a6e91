"""Tables and figures of the benchmark study, from its records alone."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.limits import (
    achieved_flops,
    host_bound,
    matrix_ceiling,
    mfu,
    step_ms,
    tokens_per_second,
)
from stepscope.records.schema import Record
from stepscope.records.stats import stability, summarize
from stepscope.report.blocks import Block, Cell, Column, Curve, Figure, Interval, Mark, Table
from stepscope.report.format import percent
from stepscope.studies.benchmark.findings import benchmark_findings
from stepscope.studies.benchmark.rows import Row, identity, identity_cells, rows_of


def benchmark_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    rows = rows_of(records)
    figures = (_time_figure(rows), _ceiling_figure(rows))
    return (
        *benchmark_findings(rows),
        *(figure for figure in figures if figure is not None),
        _times_table(rows),
        _throughput_table(rows),
    )


def headline_table(records: Sequence[Record]) -> Table | None:
    """The train steps: time, rate, distance from the limit."""
    rows = [row for row in rows_of(records) if row.step_record]
    if not rows:
        return None
    columns, shared = identity(rows)
    cells = []
    for row in rows:
        record = row.step_record
        assert record is not None
        assert row.step is not None
        cells.append(
            (
                *identity_cells(row, columns),
                Interval(value=row.step.median, low=row.step.low, high=row.step.high),
                _tokens(record),
                mfu(record),
                _verdict(record),
            )
        )
    return Table(
        name="headline",
        title="One training step",
        columns=(
            *columns.values(),
            Column(title="step", kind="number", unit="ms", hint="median with its 95 % interval"),
            Column(title="tokens/s", kind="count"),
            Column(
                title="of the limit",
                kind="percent",
                hint="model FLOPs per second over the matrix rate measured on this machine (MFU)",
            ),
            Column(title="steady?", hint="spread of the samples, and how many there are"),
        ),
        rows=tuple(cells),
        caption=f"{shared}.",
    )


def _times_table(rows: Sequence[Row]) -> Table:
    """The columns of the course's tables, and the optimizer."""
    columns, shared = identity(rows)
    shape = {"d_model": "d_model", "d_ff": "d_ff", "layers": "n_layers", "heads": "n_heads"}
    timed = (
        ("forward", "forward", ("forward",)),
        ("backward", "backward", ("forward-backward", "train-step")),
        ("fwd+bwd", "both", ("forward-backward",)),
        ("optimizer", "optimizer", ("train-step",)),
        ("step", "step", ("train-step",)),
    )
    hints = {
        "forward": "alone, its graph kept",
        "backward": "as a phase of forward-backward",
        "fwd+bwd": "forward, loss and backward timed as one",
        "optimizer": "as a phase of the train step",
        "step": "the train step timed as one, no marks inside",
    }
    heads = [
        Column(title=f"{title} {what}", kind="number", unit="ms", hint=hints[title])
        for title, _, _ in timed
        for what in ("mean", "std")
    ]
    names = list(columns)
    cells = []
    for row in rows:
        known = identity_cells(row, columns)
        sized: tuple[Cell, ...] = tuple(getattr(row.model, field) for field in shape.values())
        numbers = tuple(
            row.cell(getattr(row, attribute), what, *modes)
            for _, attribute, modes in timed
            for what in ("mean", "std")
        )
        cells.append((known[0], *sized, *known[1:], *numbers))
    return Table(
        name="benchmark-times",
        title="Forward, backward and step",
        columns=(
            columns[names[0]],
            *(Column(title=title, kind="count") for title in shape),
            *(columns[name] for name in names[1:]),
            *heads,
        ),
        rows=tuple(cells),
        caption=f"Mean and standard deviation of the samples; {shared}.",
    )


def _throughput_table(rows: Sequence[Row]) -> Table:
    columns, shared = identity(rows)
    cells = []
    for row in rows:
        for mode, record in row.by_mode.items():
            if record.status != "ok":
                outcome: tuple[Cell, ...] = (row.cell(None, "", mode), *(None,) * 6, record.reason)
                cells.append((*identity_cells(row, columns), mode, *outcome))
                continue
            step = step_ms(record)
            assert step is not None
            share = host_bound(record)
            cells.append(
                (
                    *identity_cells(row, columns),
                    mode,
                    Interval(value=step.median, low=step.low, high=step.high),
                    _tokens(record),
                    achieved_flops(record),
                    mfu(record),
                    mfu(record, measured=False),
                    share.fraction if share else None,
                    record.quantity("peak_bytes"),
                    _verdict(record),
                )
            )
    return Table(
        name="benchmark-throughput",
        title="Rates, distance from the limit, memory",
        columns=(
            *columns.values(),
            Column(title="mode"),
            Column(
                title="median", kind="number", unit="ms",
                hint="with its 95 % bootstrap interval",
            ),
            Column(title="tokens/s", kind="count"),
            Column(title="rate", kind="rate", unit="FLOP/s", hint="model FLOPs over the median"),
            Column(
                title="MFU, measured", kind="percent",
                hint="of the matrix rate measured on this machine in that format",
            ),
            Column(title="MFU, data sheet", kind="percent", hint="of the maker's dense peak"),
            Column(
                title="host-bound", kind="percent",
                hint="share of the step in phases that end with an empty launch queue",
            ),
            Column(title="peak memory", kind="bytes"),
            Column(title="steady?", hint="spread of the samples, and how many there are"),
        ),
        rows=tuple(cells),
        caption=f"{shared}.",
    )  # fmt: skip


def _tokens(record: Record) -> int | None:
    value = tokens_per_second(record)
    return None if value is None else round(value)


def _verdict(record: Record) -> str:
    series = record.find("step")
    assert series is not None
    if not stability(series.values):
        return "steady"
    held = summarize(series.values)
    return f"no: ± {percent(held.std / held.mean)} over {held.count}"


def _time_figure(rows: Sequence[Row]) -> Figure | None:
    """Step time against context, a curve for each size and format."""
    timed = [row for row in rows if row.step is not None]
    contexts = {row.workload.context for row in timed}
    if not timed:
        return None
    over_context = len(contexts) > 1
    varying = (("size",) if over_context else ()) + _varying(timed)
    groups: dict[str, list[Row]] = {}
    for row in timed:
        groups.setdefault(_label(row, varying), []).append(row)
    curves = []
    for label, members in groups.items():
        members.sort(key=lambda r: r.workload.context if over_context else r.flops.step)
        summaries = [row.step for row in members if row.step is not None]
        curves.append(
            Curve(
                label=label,
                x=tuple(
                    float(row.workload.context) if over_context else row.flops.step / 1e9
                    for row in members
                ),
                y=tuple(s.median for s in summaries),
                low=tuple(s.q1 for s in summaries),
                high=tuple(s.q3 for s in summaries),
            )
        )
    return Figure(
        name="benchmark-time",
        title="A training step against the context" if over_context else "A training step",
        kind="lines",
        curves=tuple(curves),
        x_label="context, tokens" if over_context else "model FLOPs per step, GFLOP",
        y_label="step, ms",
        x_log=True,
        y_log=True,
        caption="Median of the samples; bars span the middle half of them.",
    )


def _varying(rows: Sequence[Row]) -> tuple[str, ...]:
    """What tells the curves of a figure apart, besides size and context."""
    names = ("dtype", "attention", "compile", "optimizer", "batch")
    return tuple(n for n in names if len({getattr(row.workload, n) for row in rows}) > 1)


def _label(row: Row, names: Sequence[str]) -> str:
    return " ".join(str(getattr(row.workload, name)) for name in names) or "step"


def _ceiling_figure(rows: Sequence[Row]) -> Figure | None:
    """How much of the measured matrix rate each train step reaches, at the longest context."""
    reached: dict[str, dict[str, float]] = {}
    longest: dict[tuple[str, str], Row] = {}
    varying = _varying(rows)
    for row in rows:
        key = (_label(row, varying), row.workload.size)
        if row.step_record and (
            key not in longest or row.workload.context > longest[key].workload.context
        ):
            longest[key] = row
    for (label, _), row in longest.items():
        record = row.step_record
        assert record is not None
        share = mfu(record)
        if share is not None:
            name = f"{row.workload.size}\nc{row.workload.context}"
            reached.setdefault(label, {})[name] = 100 * share
    if not reached:
        return None
    first = next(iter(longest.values())).step_record
    assert first is not None
    ceiling = matrix_ceiling(first)
    label = "measured matrix rate" if len(reached) > 1 or ceiling is None else (
        f"measured matrix rate in {ceiling.name.removeprefix('matmul.')}"
    )  # fmt: skip
    return Figure(
        name="benchmark-ceiling",
        title="How much of the machine's limit a training step reaches",
        kind="bars",
        curves=tuple(
            Curve(label=label, x=tuple(bars), y=tuple(bars.values()))
            for label, bars in reached.items()
        ),
        x_label="size and context",
        y_label="MFU, % of the measured ceiling",
        marks=(Mark(label=label, value=100.0),),
        caption="Model FLOPs per second over the matrix rate that this machine was measured at.",
    )
