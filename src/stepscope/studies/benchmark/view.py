"""Tables of the benchmark study, from its records alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.analysis.limits import (
    achieved_flops,
    host_bound,
    mfu,
    step_ms,
    tokens_per_second,
)
from stepscope.model.config import precision
from stepscope.records.schema import Record
from stepscope.records.stats import stability, summarize
from stepscope.report.blocks import Block, Cell, Column, Interval, Table
from stepscope.report.format import percent
from stepscope.studies.benchmark.figures import benchmark_figures
from stepscope.studies.benchmark.findings import benchmark_findings
from stepscope.studies.benchmark.formats import formats_table
from stepscope.studies.benchmark.rows import (
    Row,
    common_context,
    is_steady,
    rows_of,
)
from stepscope.studies.identity import identity, identity_cells
from stepscope.studies.published_view import Mine, published_tables, step_conditions

_HEADLINE_ROWS = 12
"""More than these are a table, not a headline: then one context stands for all."""


def benchmark_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    rows = rows_of(records)
    return (
        *benchmark_findings(rows),
        *benchmark_figures(rows),
        *formats_table(rows),
        _times_table(rows),
        _throughput_table(rows),
        *published_tables("benchmark", [mine for row in rows for mine in _mine(row)]),
    )


def _mine(row: Row) -> Iterator[Mine]:
    """This step in the words of published conditions, where it ran."""
    done = [record for record in row.records if record.status == "ok"]
    work = row.workload
    values = {
        name: None if held is None else held.median
        for name, held in (
            ("forward", row.forward), ("backward", row.backward), ("both", row.both),
            ("step", row.step),
        )
    }  # fmt: skip
    conditions = step_conditions(work)
    if done and conditions is not None:
        # The figures of a step are those of all its modes.
        conditions.pop("mode")
        yield Mine(done[-1], conditions, values, f"matmul.{precision(work.dtype).compute}")


def headline_table(records: Sequence[Record]) -> Table | None:
    """The train steps: time, rate, distance from the limit."""
    rows = [row for row in rows_of(records) if row.step_record]
    if not rows:
        return None
    if len(rows) > _HEADLINE_ROWS:
        context = common_context(rows)
        rows = [row for row in rows if row.workload.context == context]
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
        sized: tuple[Cell, ...] = tuple(getattr(row.model, field, None) for field in shape.values())
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
                hint="with its 95 % interval",
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
    if is_steady(record):
        return "steady"
    if not stability(series.values):
        return "no: the machine is busy"
    held = summarize(series.values)
    return f"no: ± {percent(held.std / held.mean)} over {held.count}"
