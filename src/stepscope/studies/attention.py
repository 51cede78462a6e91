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
from stepscope.analysis.scaling import fitted_exponent
from stepscope.errors import UsageError
from stepscope.model.config import precision
from stepscope.records.schema import Environment, Quantity, Record
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Cell, Column, Curve, Figure, Finding, Table
from stepscope.report.format import bytes_, number, percent
from stepscope.studies.attention_memory import (
    memory_findings,
    peak_lines,
    peak_table,
    squares,
)
from stepscope.studies.attention_workload import AttentionMode, AttentionWorkload
from stepscope.studies.base import Bench, Case, Measurement, Study
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


class Attention(Study[AttentionFlags]):
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

    def cases(self, flags: AttentionFlags) -> tuple[Case, ...]:
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

    def _case(self, workload: AttentionWorkload, flags: AttentionFlags) -> Case:
        effort = {"warmup": flags.warmup, "steps": flags.steps}
        return Case(
            study=self.name,
            key=workload.key,
            config=msgspec.to_builtins(workload) | effort,
            needs=(precision(workload.dtype).compute,),
        )

    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        from stepscope.measure.timer import time_step
        from stepscope.studies.attention_workload import AttentionStep

        workload = msgspec.convert(config, AttentionWorkload)
        bench.device.reset_peak()
        step = AttentionStep(workload, bench.device)
        saved = step.saved_bytes()
        timing = time_step(
            step.phases(),
            bench.device,
            warmup=config["warmup"],
            steps=config["steps"],
            min_seconds=0.2,
            before=step.reset,
            progress=lambda done, total: bench.progress(done, total, "steps"),
        )
        quantities = workload.quantities()
        peak = bench.device.peak_bytes()
        # Where tensors are not counted, the resident set is too coarse for one operation.
        if saved is not None and peak is not None:
            quantities["saved_bytes"] = Quantity(value=saved, unit="B")
            quantities["peak_bytes"] = Quantity(value=peak, unit="B")
        return Measurement(series=timing.series, quantities=quantities, readings=timing.readings)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        return (
            *_findings(records),
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
        return dict.fromkeys(("seeds", "cs336-2026", "h200", "full"), (whole,)) | {
            "quick": (quick,)
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


def _named(record: Record) -> str:
    config = record.config
    return f"{config['attention']} {config['dtype']}, d {config['head']}, length {config['seq']}"


def _pass(record: Record) -> str:
    """Which pass of which attention: `forward`, and what is not the default."""
    config = record.config
    extras = [
        *([] if config["attention"] == "reference" else [config["attention"]]),
        *([] if config["dtype"] == "float32" else [config["dtype"]]),
        *(["causal"] if config["causal"] else []),
    ]
    return f"{config['mode']} ({', '.join(extras)})" if extras else str(config["mode"])


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


def _findings(records: Sequence[Record]) -> Iterator[Finding]:
    timed = [record for record in records if step_ms(record)]
    groups: dict[str, list[Record]] = {}
    for record in timed:
        groups.setdefault(_pass(record), []).append(record)
    for label, members in groups.items():
        for name, other, unit in (("seq", "head", "length"), ("head", "seq", "d")):
            yield from _growth(label, members, name, other, unit)
        yield from memory_findings(label, members)
    measured = [
        (held / predicted - 1, record)
        for record in timed
        if (held := record.quantity("saved_bytes"))
        and (predicted := record.quantity("predicted_saved_bytes"))
    ]
    if measured:
        worst, record = max(measured, key=lambda pair: abs(pair[0]))
        yield Finding(
            text=f"What a forward leaves for its backward is predicted from the shapes to within"
            f" {percent(abs(worst))} in all {len(measured)} cases (farthest: {_named(record)})."
        )
    yield from _accounting(records)


def _growth(
    label: str, records: Sequence[Record], name: str, other: str, unit: str
) -> Iterator[Finding]:
    """How time grows with length and with d, at the largest value of the other one."""
    largest = max(record.config[other] for record in records)
    points = {
        float(record.config[name]): step.median
        for record in records
        if record.config[other] == largest and (step := step_ms(record))
    }
    if len(points) < 3:
        return
    exponent = fitted_exponent(list(points), list(points.values()))
    yield Finding(
        text=f"The {label} grows as {unit} to the power {number(exponent, 3)} over"
        f" {min(points):g} to {max(points):g} (at {'d' if other == 'head' else 'length'}"
        f" {largest}); the arithmetic says {2 if name == 'seq' else 1}."
    )


def _accounting(records: Sequence[Record]) -> Iterator[Finding]:
    """The first length that does not fit, and which tensors are to blame."""
    kept = [record for record in records if record.config["attention"] == "reference"]
    failed = [record for record in kept if record.status == "oom"]
    if not kept:
        return
    largest = max(kept, key=lambda record: record.config["seq"])
    work = msgspec.convert(largest.config, AttentionWorkload)
    scores = work.batch * work.heads * work.seq**2 * work.element_bytes
    text = (
        f"At length {work.seq} one tensor of scores is {bytes_(scores)}"
        f" ({work.batch} × {work.heads} × {work.seq}² × {work.element_bytes} B). At the peak of the"
        " forward there are two (scores, probabilities), at that of the backward three"
        " (probabilities, their gradient, gradient of the scores); the output itself is"
        f" {bytes_(scores // work.seq * work.head)}."
    )
    if failed:
        first = min(failed, key=lambda record: record.config["seq"])
        memory = bytes_(first.environment.device_memory_bytes)
        wanted = msgspec.convert(first.config, AttentionWorkload)
        needed = bytes_(sum(peak_lines(wanted).values()))
        text += (
            f" The first that does not fit into {memory}: {_named(first)} {first.config['mode']},"
            f" which needs {needed} ({squares(wanted)} and the rest)."
        )
    yield Finding(text=text, tone="warn" if failed else "info")


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
