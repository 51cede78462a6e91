"""Figures of the benchmark study: time against context, and the share of the limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.analysis.limits import mfu
from stepscope.report.blocks import Curve, Figure, Mark
from stepscope.studies.benchmark.rows import Row, common_context

_VARIANT = ("table", "dtype", "attention", "compile", "optimizer", "checkpoint", "batch")
_PLAIN = {"compile": "no", "optimizer": "torch", "checkpoint": "no"}
"""What goes without saying in a label."""
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "torch-fused": "fused"}


def benchmark_figures(rows: Sequence[Row]) -> Iterator[Figure]:
    timed = [row for row in rows if row.step is not None]
    variants: dict[str, list[Row]] = {}
    varying = tuple(
        name for name in _VARIANT if len({getattr(row.workload, name) for row in timed}) > 1
    )
    for row in timed:
        variants.setdefault(_label(row, varying), []).append(row)
    for place, (label, members) in enumerate(variants.items()):
        if len({row.workload.context for row in members}) > 1:
            yield _time_against_context(place, label, members)
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


def _time_against_context(place: int, label: str, rows: Sequence[Row]) -> Figure:
    curves: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.workload.context):
        curves.setdefault(row.workload.size, []).append(row)
    suffix = f"-{place + 1}" if place else ""
    return Figure(
        name=f"benchmark-time{suffix}",
        title="A training step against the context" + ("" if label == "eager" else f", {label}"),
        kind="lines",
        curves=tuple(
            _curve(size, members, tuple(float(row.workload.context) for row in members))
            for size, members in curves.items()
        ),
        x_label="context, tokens",
        y_label="step, ms",
        x_log=True,
        y_log=True,
        caption="Median of the samples; bars span the middle half of them.",
    )


def _time_against_size(variants: dict[str, list[Row]], context: int) -> Figure:
    """At one context, so that the bars compare: the one that most rows have."""
    return Figure(
        name="benchmark-size",
        title="A training step against the size",
        kind="bars",
        curves=tuple(
            _curve(label, rows, tuple(row.workload.size for row in rows))
            for label, rows in variants.items()
            if rows
        ),
        x_label=f"size, at context {context}",
        y_label="step, ms",
        caption="Median of the samples; thin bars span the middle half of them.",
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
        title="How much of the machine's limit a training step reaches",
        kind="bars",
        curves=tuple(
            Curve(label=label, x=tuple(shares), y=tuple(shares.values()))
            for label, shares in bars.items()
        ),
        x_label=f"size, at context {context}",
        y_label="MFU, %",
        marks=(Mark(label="matrix products alone", value=100.0),),
        caption="Model FLOPs per second over the matrix rate that this machine was measured at,"
        " in the format of the step.",
    )
