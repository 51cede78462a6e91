"""What does attention written out as the formula reads cost, in time and in memory?

    stepscope run attention --head 16 64 128 --seq 256 1024 4096

Forward and backward are cases of their own: the backward is timed without the forward, from a
gradient that is there already. What the forward leaves in memory is counted and predicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from stepscope.analysis.limits import median_ms, step_ms
from stepscope.errors import UsageError
from stepscope.model.config import precision
from stepscope.records.schema import Environment, Quantity, Record
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Cell, Column, Curve, Figure, Table
from stepscope.studies.attention_findings import attention_findings
from stepscope.studies.attention_memory import peak_table
from stepscope.studies.attention_workload import AttentionMode, AttentionWorkload
from stepscope.studies.base import Bench, Measurement, PlannedCase, Study
from stepscope.studies.published_view import Mine, published_tables


class AttentionFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: every combination of the values is a case."""

    head: tuple[int, ...] = (16, 32, 64, 128)
    """Head dimensions."""
    seq: tuple[int, ...] = (256, 1024, 4096, 8192, 16384)
    """Sequence lengths."""
    batch: int = 8
    """Sequences."""
    heads: int = 1
    """Heads of each."""
    dtype: tuple[str, ...] = ("float32",)
    """float32, float16, bfloat16."""
    attention: tuple[str, ...] = ("reference",)
    """Implementations: reference, or any other (`stepscope list attentions`)."""
    causal: bool = False
    """With a causal mask."""
    warmup: int = 5
    """Steps before the first sample."""
    steps: int = 20
    """Samples at least."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0:
            raise UsageError(
                f"steps is {self.steps} and warmup {self.warmup}", "at least 1 and at least 0"
            )


class Attention(Study[AttentionFlags, Any]):
    name = "attention"
    title = "Attention, written out"
    question = (
        "What does attention cost as the formula reads, in time and in memory,"
        " and where does it stop to fit?"
    )
    examples = (
        "stepscope run attention",
        "stepscope run attention --head 64 --seq 1024 4096 16384 --causal --dtype bfloat16",
    )
    flags = AttentionFlags
    no_model = "it measures attention alone"

    def cases(self, flags: AttentionFlags) -> tuple[PlannedCase, ...]:
        modes: tuple[AttentionMode, ...] = ("forward", "backward")
        return tuple(
            self._case(
                AttentionWorkload(
                    attention=attention,
                    batch=flags.batch,
                    heads=flags.heads,
                    seq=seq,
                    head=head,
                    dtype=precision(dtype).name,
                    causal=flags.causal,
                    mode=mode,
                ),
                flags,
            )
            for attention, dtype, seq, head, mode in itertools.product(
                flags.attention, flags.dtype, flags.seq, flags.head, modes
            )
        )

    def _case(self, workload: AttentionWorkload, flags: AttentionFlags) -> PlannedCase:
        effort = {"warmup": flags.warmup, "steps": flags.steps}
        return PlannedCase(
            study=self.name,
            key=workload.key,
            config=msgspec.to_builtins(workload) | effort,
            needs=(precision(workload.dtype).compute,),
        )

    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        from stepscope.studies.attention_workload import AttentionStep
        from stepscope.studies.timed_step import time_steps

        workload = msgspec.convert(config, AttentionWorkload)
        bench.device.reset_peak()
        step = AttentionStep(workload, bench.device)
        saved = step.saved_bytes()
        timing = time_steps(step, bench, config, min_seconds=0.2)
        quantities = list(workload.quantities())
        peak = bench.device.peak_bytes()
        # Where tensors are not counted, the resident set is too coarse for one operation.
        if saved is not None and peak is not None:
            quantities.append(Quantity(name="saved_bytes", value=saved, unit="B"))
            quantities.append(Quantity(name="peak_bytes", value=peak, unit="B"))
        if bench.device.kind == "cuda":
            from stepscope.measure.allocator import CudaAllocator

            held = CudaAllocator(bench.device.torch_device).library_bytes()
            quantities.append(Quantity(name="library_bytes", value=held, unit="B"))
        return Measurement(
            series=timing.series, quantities=tuple(quantities), readings=timing.readings
        )

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        return (
            *attention_findings(records),
            *_figures(records),
            _table(records),
            *peak_table(records),
            *published_tables("attention", [_mine(r) for r in records if step_ms(r)]),
        )

    def presets(self, environment: Environment) -> Mapping[str, Sequence[AttentionFlags]]:
        if environment.device_kind == "cpu":
            quick = AttentionFlags(head=(16, 64), seq=(128, 256, 512), batch=4, steps=5, warmup=1)
        else:
            quick = AttentionFlags(head=(64, 128), seq=(256, 1024, 4096))
        whole = AttentionFlags()
        # On a GPU of 140 GiB the first length that does not fit is longer than the course's.
        longer = AttentionFlags(head=(64,), seq=(32768, 65536))
        return dict.fromkeys(("seeds", "cs336-2026", "full"), (whole,)) | {
            "h200": (whole, longer),
            "quick": (quick,),
        }


STUDY = Attention()


def _mine(record: Record) -> Mine:
    """A pass in the words of published conditions; written out it is limited by memory."""
    held = step_ms(record)
    values = {record.config["mode"]: held.median if held else None}
    values |= {
        name: record.quantity(quantity)
        for name, quantity in (("before backward", "saved_bytes"), ("peak", "peak_bytes"))
        if record.config["mode"] == "backward"
    }
    return Mine(record, record.config, values, "memory.copy")


def _table(records: Sequence[Record]) -> Table:
    groups: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        c = record.config
        key = (c["attention"], c["dtype"], c["causal"], c["head"], c["seq"])
        groups.setdefault(key, {})[c["mode"]] = record
    rows = [
        (
            attention, dtype, "causal" if causal else "full", head, seq,
            *_times(modes.get("forward")), *_times(modes.get("backward")),
            *_memory(modes.get("backward") or modes.get("forward")),
        )
        for (attention, dtype, causal, head, seq), modes in groups.items()
    ]  # fmt: skip
    times = [
        Column(title=f"{mode} {what}", kind="number", unit="ms", hint=hint)
        for mode in ("forward", "backward")
        for what, hint in (
            ("mean", ""),
            ("std", ""),
            ("host", "until the host had issued it; on a CPU the same as the time"),
        )
    ]
    return Table(
        name="attention-times",
        title="Forward, backward, memory",
        columns=(
            Column(title="attention"),
            Column(title="dtype"),
            Column(title="mask"),
            Column(title="d", kind="count"),
            Column(title="length", kind="count"),
            *times,
            Column(title="before backward", kind="bytes", hint="in use after the forward"),
            Column(title="predicted", kind="bytes", hint="of that, from the shapes alone"),
            Column(title="peak", kind="bytes"),
        ),
        rows=tuple(rows),
        caption="The backward is timed alone, from a gradient that is there already.",
    )


def _times(record: Record | None) -> tuple[Cell, ...]:
    if record is None:
        return (None, None, None)
    if record.status != "ok":
        return (record.status.upper(), None, None)
    series = record.find("step")
    assert series is not None
    held = summarize(series.values)
    return (held.mean, held.std, median_ms(record, "issue", "host"))


def _memory(record: Record | None) -> tuple[Cell, ...]:
    if record is None:
        return (None, None, None)
    predicted = record.quantity("predicted_saved_bytes")
    return (record.quantity("saved_bytes"), predicted, record.quantity("peak_bytes"))


def _figures(records: Sequence[Record]) -> Iterator[Figure]:
    for mode in ("forward", "backward"):
        chosen = [r for r in records if r.config["mode"] == mode and step_ms(r)]
        curves = tuple(_curves(chosen))
        if curves and any(len(curve.x) > 1 for curve in curves):
            yield Figure(
                name=f"attention-{mode}",
                title=f"The {mode} against the length",
                kind="lines",
                curves=curves,
                x_label="sequence length, tokens",
                y_label=f"{mode}, ms",
                x_log=True,
                y_log=True,
                caption="Median of the samples; bars span the middle half of them.",
            )


def _curves(records: Sequence[Record]) -> Iterator[Curve]:
    groups: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda r: r.config["seq"]):
        varying = [
            str(record.config[name])
            for name in ("attention", "dtype")
            if len({r.config[name] for r in records}) > 1
        ]
        label = " ".join((*varying, f"d {record.config['head']}"))
        groups.setdefault(label, []).append(record)
    for label, members in groups.items():
        summaries = [step for record in members if (step := step_ms(record))]
        yield Curve(
            label=label,
            x=tuple(float(record.config["seq"]) for record in members),
            y=tuple(s.median for s in summaries),
            low=tuple(s.q1 for s in summaries),
            high=tuple(s.q3 for s in summaries),
        )
