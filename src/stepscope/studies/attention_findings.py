"""What the records of attention alone say: how it grows, what it keeps, where it stops to fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from stepscope.analysis.limits import step_ms
from stepscope.analysis.scaling import fitted_exponent
from stepscope.attention import cost
from stepscope.records.schema import Record
from stepscope.report.blocks import Finding
from stepscope.report.format import bytes_, duration, number
from stepscope.studies.attention_memory import (
    memory_findings,
    off_by,
    predicted_peak_bytes,
    squares,
)
from stepscope.studies.attention_workload import AttentionWorkload
from stepscope.studies.trusted import all_good

LONGEST = 3
"""Lengths that an exponent is fitted to: at short ones the host decides, and fixed costs do."""

SHRINKS = -0.1
"""An exponent below this is an error of measurement: longer sequences have more work."""


def attention_findings(records: Sequence[Record]) -> Iterator[Finding]:
    timed = [record for record in records if step_ms(record)]
    groups: dict[str, list[Record]] = {}
    for record in timed:
        groups.setdefault(_pass(record), []).append(record)
    for label, members in groups.items():
        yield from _growth_with_length(label, members)
        yield from _growth_with_width(label, members)
        yield from memory_findings(label, members, LONGEST)
    kept = {
        _named(record): (held, predicted)
        for record in timed
        if (held := record.quantity("saved_bytes"))
        and (predicted := record.quantity("predicted_saved_bytes"))
    }
    if kept:
        yield Finding(
            text="What a forward leaves for its backward is predicted from the shapes:"
            f" {off_by(kept)}."
        )
    yield from _accounting(records)


def _named(record: Record) -> str:
    config = record.config
    return (
        f"{config['attention']} {config['dtype']}, d {config['head']}, length {config['seq']},"
        f" {config['mode']}"
    )


def _pass(record: Record) -> str:
    """Which pass of which attention: `forward`, and what is not the default."""
    config = record.config
    extras = [
        *([] if config["attention"] == "reference" else [config["attention"]]),
        *([] if config["dtype"] == "float32" else [config["dtype"]]),
        *(["causal"] if config["causal"] else []),
    ]
    return f"{config['mode']} ({', '.join(extras)})" if extras else str(config["mode"])


def _growth_with_length(label: str, records: Sequence[Record]) -> Iterator[Finding]:
    widest = max(record.config["head"] for record in records)
    timed = _by("seq", [r for r in records if r.config["head"] == widest])[-LONGEST:]
    if len(timed) < LONGEST:
        return
    points = _times(timed)
    exponent = fitted_exponent(*zip(*points, strict=True))
    if exponent < SHRINKS or not all_good(record for *_, record in timed):
        yield _not_fitted(label, "length", timed, exponent)
        return
    yield Finding(
        code="attention.growth-with-length",
        values={"pass": label, "exponent": exponent, "head": widest},
        text=f"The {label} grows as length to the power {number(exponent, 3)} over"
        f" {points[0][0]:g} to {points[-1][0]:g} (at d {widest}); the arithmetic says 2.",
        records=tuple(record.id for *_, record in timed),
    )


def _growth_with_width(label: str, records: Sequence[Record]) -> Iterator[Finding]:
    longest = max(record.config["seq"] for record in records)
    timed = _by("head", [r for r in records if r.config["seq"] == longest])
    if len(timed) < LONGEST:
        return
    points = _times(timed)
    widths, times = zip(*points, strict=True)
    exponent = fitted_exponent(widths, times)
    if not all_good(record for *_, record in timed):
        yield _not_fitted(label, "d", timed, exponent)
        return
    _, at_zero = np.polyfit(widths, times, 1)
    text = (
        f"The {label} grows as d to the power {number(exponent, 3)} over {points[0][0]:g} to"
        f" {points[-1][0]:g} (at length {longest}); the arithmetic says 1."
    )
    if at_zero > 0:
        text += (
            f" A straight line through the times leaves {number(at_zero, 3)} ms at d 0: moving the"
            " tensors of length × length costs that, whatever d is."
        )
    yield Finding(
        code="attention.growth-with-width",
        values={"pass": label, "exponent": exponent, "length": longest},
        text=text,
        records=tuple(record.id for *_, record in timed),
    )


Timed = tuple[float, float, Record]
"""A length or a width, the time of a step there, and its record."""


def _by(name: str, records: Sequence[Record]) -> list[Timed]:
    found = {
        float(r.config[name]): (float(r.config[name]), step.median, r)
        for r in records
        if (step := step_ms(r))
    }
    return [found[value] for value in sorted(found)]


def _times(timed: Sequence[Timed]) -> list[tuple[float, float]]:
    return [(value, ms) for value, ms, _ in timed]


def _not_fitted(label: str, over: str, timed: Sequence[Timed], exponent: float) -> Finding:
    """No exponent of noise: the times alone, as they were measured."""
    told = ", ".join(f"{duration(ms)} at {value:g}" for value, ms, _ in timed)
    return Finding(
        code="attention.growth-unknown",
        values={"pass": label, "over": over, "exponent": exponent},
        text=f"How the {label} grows with {over} cannot be told from its times: {told}.",
        tone="warn",
        records=tuple(record.id for *_, record in timed),
    )


def _accounting(records: Sequence[Record]) -> Iterator[Finding]:
    """The tensors that fill the memory, and the first length that does not fit."""
    kept = [record for record in records if record.config["attention"] == "reference"]
    if not kept:
        return
    failed = [record for record in kept if record.status == "oom"]
    largest = max(kept, key=lambda record: record.config["seq"])
    work = msgspec.convert(largest.config, AttentionWorkload)
    on_cuda = largest.environment.device_kind == "cuda"
    scores = cost.probability_bytes(work.shape, work.element_bytes)
    text = (
        f"At length {work.seq} one tensor of scores is {bytes_(scores)}"
        f" ({work.batch} × {work.heads} × {work.seq}² × {work.element_bytes} B). At the peak of the"
        f" forward there are {squares('forward', on_cuda)}, at that of the backward"
        f" {squares('backward', on_cuda)}; the output itself, at d {work.head}, is"
        f" {bytes_(cost.output_bytes(work.shape, work.element_bytes))}."
    )
    memory = largest.environment.device_memory_bytes
    if failed:
        first = min(failed, key=lambda record: record.config["seq"])
        needed = predicted_peak_bytes(msgspec.convert(first.config, AttentionWorkload), on_cuda)
        text += (
            f" The first that does not fit into {bytes_(memory)}: {_named(first)}, whose tensors"
            f" need {bytes_(needed or 0)} at once"
        )
        if needed is not None and needed <= memory:
            text += ", so what the allocator holds in pieces too small for the next is the rest"
        text += "."
    elif on_cuda:
        text += f" {_first_beyond(work, memory)}"
    yield Finding(text=text, tone="warn" if failed else "info")


def _first_beyond(work: AttentionWorkload, memory: int) -> str:
    """By doubling the length, from the tensors alone."""
    fits = work = msgspec.structs.replace(work, mode="backward")
    while (predicted_peak_bytes(work, True) or 0) <= memory:
        fits, work = work, msgspec.structs.replace(work, seq=2 * work.seq)
    return (
        f"All fit into {bytes_(memory)}; so would {fits.seq}"
        f" ({bytes_(predicted_peak_bytes(fits, True) or 0)}), and the backward of {work.seq} would"
        f" not: it needs {bytes_(predicted_peak_bytes(work, True) or 0)}."
    )
