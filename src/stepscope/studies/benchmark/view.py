"""Tables and figures of the benchmark study. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import methodcaller
from typing import NamedTuple

import msgspec

from stepscope.analysis.limits import achieved_flops
from stepscope.records.schema import Record
from stepscope.records.stats import stability, summarize
from stepscope.report.blocks import Block, Figure, Table
from stepscope.report.format import percent
from stepscope.report.tables import col, cols, table
from stepscope.studies.base import Result
from stepscope.studies.benchmark.cases import BenchmarkCase
from stepscope.studies.benchmark.findings import benchmark_findings
from stepscope.studies.benchmark.rows import (
    BenchmarkRow,
    common_context,
    is_steady,
    pairs_of,
    rows_of,
)
from stepscope.views.builders import (
    HOST_BOUND,
    HOST_SHARE,
    MFU,
    STEP_MS,
    TOKENS,
    grouped,
    sampled_curve,
    suffix,
)
from stepscope.views.identity import step_columns
from stepscope.views.verdict import limit_share

_HEADLINE_ROWS = 12
"""Rows above which the headline shows a single context."""
_STEADY = "or else the spread of the samples"
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
OF_LIMIT = col(
    "of the limit",
    lambda r: limit_share(r.record, msgspec.structs.replace(r.workload, mode=r.mode)),
    "percent",
    hint="the hardware limit as a share of the step: matmuls in the fastest dtype that a change"
    " could apply, and each byte moved once",
)
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "torch-fused": "fused"}


def view(results: Sequence[Result[BenchmarkCase]]) -> tuple[Block, ...]:
    rows = rows_of(results)
    return (
        *benchmark_findings(rows),
        *_figures(rows),
        *dtypes_table(rows),
        _times_table(rows),
        _throughput_table(rows),
    )


class Timed(NamedTuple):
    """One mode of a training step."""

    workload: BenchmarkCase
    mode: str
    record: Record


def headline_rows(results: Sequence[Result[BenchmarkCase]]) -> list[BenchmarkRow]:
    """The train steps; of many those at one context."""
    rows = [row for row in rows_of(results) if row.step_record]
    if len(rows) > _HEADLINE_ROWS:
        context = common_context(rows)
        rows = [row for row in rows if row.workload.context == context]
    return rows


def headline_table(results: Sequence[Result[BenchmarkCase]]) -> Table | None:
    """The train steps: time, rate, distance from the hardware limit."""
    rows = headline_rows(results)
    if not rows:
        return None
    timed = [Timed(row.workload, "train-step", row.step_record) for row in rows if row.step_record]
    columns, shared = step_columns(rows)
    return table(
        "headline",
        "One training step",
        timed,
        [
            *columns,
            STEP_MS,
            TOKENS,
            OF_LIMIT,
            MFU[0],
            col("steady?", _steadiness, hint=_STEADY),
        ],
        caption=f"{shared}.",
    )


def dtypes_table(rows: Sequence[BenchmarkRow]) -> Iterator[Table]:
    pairs = pairs_of(rows)
    if not pairs:
        return
    columns, shared = step_columns(pairs)
    yield table(
        "benchmark-formats",
        "Dtypes compared with float32",
        pairs,
        [
            *(declared for declared in columns if declared.column.title != "dtype"),
            col("dtype", lambda pair: pair.workload.dtype),
            *cols(
                ("forward", "backward", "optimizer", "step"),
                lambda pair, part: pair.gain(part),
                unit="× as fast",
            ),
            col("step in float32", lambda pair: pair.base.cell("step", "median"), unit="ms"),
            col("step", lambda pair: pair.row.cell("step", "median"), unit="ms"),
            col("CPU-bound", lambda p: p.host and p.host.fraction, "percent", hint=HOST_BOUND),
        ],
        caption=f"Median time in float32 over median time in the dtype; {shared}.",
    )


def _times_table(rows: Sequence[BenchmarkRow]) -> Table:
    """The columns of the course's tables, plus the optimizer."""
    (size, *columns), shared = step_columns(rows)
    shape = {"d_model": "d_model", "d_ff": "d_ff", "layers": "n_layers", "heads": "n_heads"}
    return table(
        "benchmark-times",
        "Forward, backward and step",
        rows,
        [
            size,
            *cols(
                shape, lambda row, title: getattr(row.workload.shape, shape[title], None), "count"
            ),
            *columns,
            *(
                col(title, methodcaller("spread", part), unit="ms", hint=hint)
                for title, (part, hint) in _TIMED.items()
            ),
        ],
        caption=f"Mean ± standard deviation of the samples; {shared}.",
    )


def _throughput_table(rows: Sequence[BenchmarkRow]) -> Table:
    columns, shared = step_columns(rows)
    return table(
        "benchmark-throughput",
        "Rates, distance from the hardware limit, memory",
        [Timed(row.workload, *one) for row in rows for one in row.by_mode.items()],
        [
            *columns,
            col("mode", lambda r: r.mode, key=True),
            col("median", STEP_MS.value, unit="ms", hint="with its 95 % interval"),
            TOKENS,
            col(
                "rate",
                lambda r: achieved_flops(r.record),
                "rate",
                unit="FLOP/s",
                hint="model FLOPs over the median",
            ),
            OF_LIMIT,
            *MFU,
            HOST_SHARE,
            col("peak memory", lambda r: r.record.quantity("peak_bytes"), "bytes"),
            col("steady?", _steadiness, hint=_STEADY, key=True),
        ],
        caption=f"{shared}.",
    )


def _steadiness(row: Timed) -> str:
    """Steadiness of the samples, or the reason of a failed case."""
    series = row.record.find("step")
    if row.record.status != "ok" or series is None:
        return row.record.reason
    if is_steady(row.record):
        return "steady"
    if not stability(series.values):
        return "busy machine"
    summary = summarize(series.values)
    return f"± {percent(summary.std / summary.mean)}"


def _figures(rows: Sequence[BenchmarkRow]) -> Iterator[Figure]:
    timed = [row for row in rows if row.step is not None]
    varying = [name for name in _VARIANT if len({getattr(row.workload, name) for row in timed}) > 1]
    variants = grouped(timed, lambda row: _label(row, varying))
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


def _label(row: BenchmarkRow, names: Sequence[str]) -> str:
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


def _time_against_context(index: int, label: str, rows: Sequence[BenchmarkRow]) -> Figure:
    by_context = sorted(rows, key=lambda row: row.workload.context)
    return Figure(
        name=f"benchmark-time{suffix(index)}",
        title="Training step by context" + ("" if label == "eager" else f", {label}"),
        curves=tuple(
            sampled_curve(size, ((float(r.workload.context), r.step) for r in members if r.step))
            for size, members in grouped(by_context, lambda row: row.workload.size).items()
        ),
        x_label="context, tokens",
        y_label="step, ms",
        x_log=True,
        y_log=True,
        caption="Median of the samples; bars show the interquartile range.",
    )


def _time_against_size(variants: dict[str, list[BenchmarkRow]], context: int) -> Figure:
    """Bars at the most frequent context, so that they are comparable."""
    return Figure(
        name="benchmark-size",
        title="Training step by size",
        kind="bars",
        curves=tuple(
            sampled_curve(label, ((row.workload.size, row.step) for row in rows if row.step))
            for label, rows in variants.items()
            if rows
        ),
        x_label=f"size, at context {context}",
        y_label="step, ms",
        caption="Median of the samples; thin bars show the interquartile range.",
    )
