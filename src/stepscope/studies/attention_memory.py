"""What attention written out has in memory at its peak, tensor by tensor, and what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from stepscope.analysis.scaling import fitted_exponent
from stepscope.attention import cost
from stepscope.records.schema import Record
from stepscope.report.blocks import Cell, Column, Finding, Table
from stepscope.report.format import bytes_, number, percent
from stepscope.studies.attention_workload import AttentionWorkload

_AT_THE_PEAK = {
    "forward": ("scores", "probabilities"),
    "backward": ("probabilities", "their gradient", "gradient of the scores"),
}
"""Tensors of length × length that are there at once: while the softmax runs, and while its
gradient is made."""


def peak_lines(work: AttentionWorkload) -> dict[str, int]:
    """Bytes of every tensor at the peak of the reference form."""
    mode = "forward" if work.mode == "forward" else "backward"
    wide, shape = work.element_bytes, work.shape
    lines = {
        "q, k, v": cost.input_bytes(shape, wide),
        "gradient of the output": cost.output_bytes(shape, wide),
        "output": cost.output_bytes(shape, wide),
    }
    lines |= dict.fromkeys(_AT_THE_PEAK[mode], cost.probability_bytes(shape, wide))
    if work.causal:
        lines["mask"] = cost.mask_bytes(shape, causal=True)
    if mode == "backward":
        lines["gradient of v"] = cost.output_bytes(shape, wide)
    return lines


def predicted_peak_bytes(work: AttentionWorkload) -> int | None:
    """None for forms whose tensors we do not know one by one."""
    return sum(peak_lines(work).values()) if work.attention == "reference" else None


def squares(work: AttentionWorkload) -> str:
    """`scores, probabilities`: the tensors of length × length at the peak."""
    return ", ".join(_AT_THE_PEAK["forward" if work.mode == "forward" else "backward"])


def peak_table(records: Sequence[Record]) -> Iterator[Table]:
    """The largest case of each pass that ran, line by line, against what the device counted."""
    rows: list[tuple[Cell, ...]] = []
    for mode in _AT_THE_PEAK:
        measured = [
            record
            for record in records
            if record.config["attention"] == "reference"
            and record.config["mode"] == mode
            and record.quantity("peak_bytes")
        ]
        if not measured:
            continue
        largest = max(measured, key=lambda record: record.quantity("peak_bytes") or 0)
        work = msgspec.convert(largest.config, AttentionWorkload)
        peak = largest.quantity("peak_bytes") or 0
        title = f"{mode}, d {work.head}, length {work.seq}"
        lines = peak_lines(work)
        rows += [(title, name, size, size / peak) for name, size in lines.items()]
        rows.append((title, "not accounted for", peak - sum(lines.values()), None))
        rows.append((title, "measured peak", peak, 1.0))
    if rows:
        yield Table(
            name="attention-peak",
            title="What is in memory at the peak",
            columns=(
                Column(title="pass"),
                Column(title="tensor"),
                Column(title="bytes", kind="bytes"),
                Column(title="of the peak", kind="percent"),
            ),
            rows=tuple(rows),
            caption="The largest case of each pass that ran. Not accounted for: workspaces of the"
            " matrix library, rounding of the allocator.",
        )


def memory_findings(label: str, records: Sequence[Record]) -> Iterator[Finding]:
    """How memory grows, and how near the prediction is."""
    for name, what in (("saved_bytes", "leaves for its backward"), ("peak_bytes", "peaks at")):
        for varied, fixed, unit in (("seq", "head", "length"), ("head", "seq", "d")):
            held = [record for record in records if record.quantity(name)]
            if not held:
                continue
            largest = max(record.config[fixed] for record in held)
            points = {
                float(record.config[varied]): record.quantity(name) or 0.0
                for record in held
                if record.config[fixed] == largest
            }
            if len(points) >= 3:
                exponent = fitted_exponent(list(points), list(points.values()))
                yield Finding(
                    text=f"What the {label} {what} grows as {unit} to the power"
                    f" {number(exponent, 3)} over {min(points):g} to {max(points):g}."
                )
    known = [
        (peak / predicted - 1, record)
        for record in records
        if (peak := record.quantity("peak_bytes"))
        and (predicted := predicted_peak_bytes(msgspec.convert(record.config, AttentionWorkload)))
    ]
    if known:
        worst, record = max(known, key=lambda pair: abs(pair[0]))
        work = msgspec.convert(record.config, AttentionWorkload)
        yield Finding(
            text=f"The peak of the {label} is predicted from the tensors one by one to within"
            f" {percent(abs(worst))} in all {len(known)} cases (farthest: d {work.head}, length"
            f" {work.seq}, {bytes_(record.quantity('peak_bytes') or 0)})."
        )
