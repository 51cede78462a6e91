"""Tables and figures of the benchmark study. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

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
from stepscope.report.blocks import Block, Cell, Curve, Figure, Interval, LimitLine, Table
from stepscope.report.format import percent
from stepscope.report.tables import col, table
from stepscope.studies.base import Result
from stepscope.studies.benchmark.cases import BenchmarkCase
from stepscope.studies.benchmark.findings import benchmark_findings
from stepscope.studies.benchmark.rows import Pair, Row, common_context, is_steady, pairs_of, rows_of
from stepscope.studies.identity import step_columns
from stepscope.studies.views.published import Mine, published_tables, step_conditions

_HEADLINE_ROWS = 12
"""Rows above which the headline shows a single context."""
_HOST_BOUND = "share of the step in phases that end with an empty launch queue"
_STEADY = "spread of the samples, and their number"
_TIMED = {
    "forward": ("forward", "alone, with its graph retained"),
    "backward": ("backward", "as a phase of forward-backward"),
    "fwd+bwd": ("both", "forward, loss and backward timed as one"),
    "optimizer": ("optimizer", "as a phase of the train step"),
    "step": ("step", "the train step timed as one, no marks inside"),
}
"""Column titles of times, with the part of the row and the hint."""
_VARIANT = ("table", "dtype", "attention", "compile", "optimizer", "checkpoint", "batch")
_PLAIN = {"compile": "no", "optimizer": "torch", "checkpoint": "no"}
"""Default values, which a label leaves out."""
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "torch-fused": "fused"}


def benchmark_blocks(results: Sequence[Result[BenchmarkCase]]) -> tuple[Block, ...]:
    rows = rows_of(results)
    return (
        *benchmark_findings(rows),
        *_figures(rows),
        *formats_table(rows),
        _times_table(rows),
        _throughput_table(rows),
        *published_tables("benchmark", [mine for row in rows for mine in _mine(row)]),
    )


def _mine(row: Row) -> Iterator[Mine]:
    """The row as conditions of published figures, if it ran."""
    conditions = step_conditions(row.workload)
    if row.done and conditions is not None:
        # Published figures of a step cover all its modes.
        conditions.pop("mode")
        parts = {
            "forward": row.forward,
            "backward": row.backward,
            "both": row.both,
            "step": row.step,
        }
        values = {name: one.median if one else None for name, one in parts.items()}
        ceiling = f"matmul.{precision(row.workload.dtype).compute}"
        yield Mine(row.done[-1], conditions, values, ceiling)


class Timed(NamedTuple):
    """One mode of a training step."""

    workload: BenchmarkCase
    mode: str
    record: Record


def headline_table(results: Sequence[Result[BenchmarkCase]]) -> Table | None:
    """The train steps: time, rate, distance from the limit."""
    rows = [row for row in rows_of(results) if row.step_record]
    if not rows:
        return None
    if len(rows) > _HEADLINE_ROWS:
        context = common_context(rows)
        rows = [row for row in rows if row.workload.context == context]
    timed = [Timed(row.workload, "train-step", row.step_record) for row in rows if row.step_record]
    columns, shared = step_columns(rows)
    return table(
        "headline",
        "One training step",
        timed,
        [
            *columns,
            col("step", _median, unit="ms", hint="median with its 95 % interval"),
            col("tokens/s", _tokens, "count"),
            col(
                "of the limit",
                lambda r: mfu(r.record),
                "percent",
                hint="model FLOPs per second over the matmul rate measured on this machine (MFU)",
            ),
            col("steady?", _verdict, hint=_STEADY),
        ],
        caption=f"{shared}.",
    )


def formats_table(rows: Sequence[Row]) -> Iterator[Table]:
    pairs = pairs_of(rows)
    if not pairs:
        return
    columns, shared = step_columns(pairs)
    yield table(
        "benchmark-formats",
        "Dtypes compared with float32",
        pairs,
        [
            *(one for one in columns if one.column.title != "dtype"),
            col("dtype", lambda pair: pair.workload.dtype),
            *(
                col(part, partial(_gain, part), unit="× as fast")
                for part in ("forward", "backward", "optimizer", "step")
            ),
            col("step in float32", lambda pair: pair.base.cell("step", "median"), unit="ms"),
            col("step", lambda pair: pair.row.cell("step", "median"), unit="ms"),
            col(
                "host-bound",
                lambda pair: pair.host.fraction if pair.host else None,
                "percent",
                hint=_HOST_BOUND,
            ),
        ],
        caption=f"Median time in float32 over median time in the dtype; {shared}.",
    )


def _gain(part: str, pair: Pair) -> float | None:
    return pair.gain(part)


def _times_table(rows: Sequence[Row]) -> Table:
    """The columns of the course's tables, plus the optimizer."""
    (size, *columns), shared = step_columns(rows)
    shape = {"d_model": "d_model", "d_ff": "d_ff", "layers": "n_layers", "heads": "n_heads"}
    return table(
        "benchmark-times",
        "Forward, backward and step",
        rows,
        [
            size,
            *(col(title, partial(_of_shape, name), "count") for title, name in shape.items()),
            *columns,
            *(
                col(
                    f"{title} {what}",
                    partial(_statistic, part, what),
                    unit="ms",
                    hint=hint,
                )
                for title, (part, hint) in _TIMED.items()
                for what in ("mean", "std")
            ),
        ],
        caption=f"Mean and standard deviation of the samples; {shared}.",
    )


def _of_shape(name: str, row: Row) -> int | None:
    value: int | None = getattr(row.workload.shape, name, None)
    return value


def _statistic(part: str, what: str, row: Row) -> Cell:
    return row.cell(part, what)


def _throughput_table(rows: Sequence[Row]) -> Table:
    columns, shared = step_columns(rows)
    return table(
        "benchmark-throughput",
        "Rates, distance from the limit, memory",
        [Timed(row.workload, *one) for row in rows for one in row.by_mode.items()],
        [
            *columns,
            col("mode", lambda r: r.mode, key=True),
            col("median", _median, unit="ms", hint="with its 95 % interval"),
            col("tokens/s", _tokens, "count"),
            col(
                "rate",
                lambda r: achieved_flops(r.record),
                "rate",
                unit="FLOP/s",
                hint="model FLOPs over the median",
            ),
            col(
                "MFU, measured",
                lambda r: mfu(r.record),
                "percent",
                hint="of the matmul rate measured on this machine in that dtype",
            ),
            col(
                "MFU, data sheet",
                lambda r: mfu(r.record, measured=False),
                "percent",
                hint="of the manufacturer's dense peak",
            ),
            col("host-bound", _host_share, "percent", hint=_HOST_BOUND),
            col("peak memory", lambda r: r.record.quantity("peak_bytes"), "bytes"),
            col("steady?", _verdict, hint=_STEADY, key=True),
        ],
        caption=f"{shared}.",
    )


def _median(row: Timed) -> Interval | None:
    step = step_ms(row.record)
    return None if step is None else Interval(value=step.median, low=step.low, high=step.high)


def _tokens(row: Timed) -> int | None:
    value = tokens_per_second(row.record)
    return None if value is None else round(value)


def _host_share(row: Timed) -> float | None:
    share = host_bound(row.record)
    return share.fraction if share else None


def _verdict(row: Timed) -> str:
    """Steadiness of the samples, or the reason of a failed case."""
    series = row.record.find("step")
    if row.record.status != "ok" or series is None:
        return row.record.reason
    if is_steady(row.record):
        return "steady"
    if not stability(series.values):
        return "no: the machine is busy"
    summary = summarize(series.values)
    return f"no: ± {percent(summary.std / summary.mean)} over {summary.count}"


def _figures(rows: Sequence[Row]) -> Iterator[Figure]:
    timed = [row for row in rows if row.step is not None]
    variants: dict[str, list[Row]] = {}
    varying = tuple(
        name for name in _VARIANT if len({getattr(row.workload, name) for row in timed}) > 1
    )
    for row in timed:
        variants.setdefault(_label(row, varying), []).append(row)
    for index, (label, members) in enumerate(variants.items()):
        if len({row.workload.context for row in members}) > 1:
            yield _time_against_context(index, label, members)
    if timed:
        context = common_context(timed)
        at_context = {
            label: [row for row in members if row.workload.context == context]
            for label, members in variants.items()
        }
        yield _time_against_size(at_context, context)
        yield from _share_of_the_limit(at_context, context)


def _label(row: Row, names: Sequence[str]) -> str:
    words = []
    for name in names:
        value = getattr(row.workload, name)
        if value != _PLAIN.get(name):
            named = {
                "compile": "compiled",
                "batch": f"batch {value}",
                "checkpoint": f"checkpoint {value}",
            }.get(name, str(value))
            words.append(_SHORT.get(named, named))
    return " ".join(words) or "eager"


def _time_against_context(index: int, label: str, rows: Sequence[Row]) -> Figure:
    curves: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.workload.context):
        curves.setdefault(row.workload.size, []).append(row)
    suffix = f"-{index + 1}" if index else ""
    return Figure(
        name=f"benchmark-time{suffix}",
        title="Training step by context" + ("" if label == "eager" else f", {label}"),
        kind="lines",
        curves=tuple(
            _curve(size, members, tuple(float(row.workload.context) for row in members))
            for size, members in curves.items()
        ),
        x_label="context, tokens",
        y_label="step, ms",
        x_log=True,
        y_log=True,
        caption="Median of the samples; bars show the interquartile range.",
    )


def _time_against_size(variants: dict[str, list[Row]], context: int) -> Figure:
    """Bars at the most frequent context, so that they are comparable."""
    return Figure(
        name="benchmark-size",
        title="Training step by size",
        kind="bars",
        curves=tuple(
            _curve(label, rows, tuple(row.workload.size for row in rows))
            for label, rows in variants.items()
            if rows
        ),
        x_label=f"size, at context {context}",
        y_label="step, ms",
        caption="Median of the samples; thin bars show the interquartile range.",
    )


def _curve(label: str, rows: Sequence[Row], x: tuple[str, ...] | tuple[float, ...]) -> Curve:
    summaries = [row.step for row in rows if row.step is not None]
    return Curve(
        label=label,
        x=x,
        y=tuple(summary.median for summary in summaries),
        low=tuple(summary.q1 for summary in summaries),
        high=tuple(summary.q3 for summary in summaries),
    )


def _share_of_the_limit(variants: dict[str, list[Row]], context: int) -> Iterator[Figure]:
    bars: dict[str, dict[str, float]] = {}
    for label, rows in variants.items():
        for row in rows:
            share = mfu(row.step_record) if row.step_record else None
            if share is not None:
                bars.setdefault(label, {})[row.workload.size] = 100 * share
    if not bars:
        return
    yield Figure(
        name="benchmark-ceiling",
        title="MFU of a training step",
        kind="bars",
        curves=tuple(
            Curve(label=label, x=tuple(shares), y=tuple(shares.values()))
            for label, shares in bars.items()
        ),
        x_label=f"size, at context {context}",
        y_label="MFU, %",
        marks=(LimitLine(label="matmul alone", value=100.0),),
        caption="Model FLOPs per second over the matmul rate measured on this machine, in the dtype"
        " of the step.",
    )
