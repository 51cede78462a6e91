"""What attention written out has in memory at its peak, tensor by tensor, and what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from stepscope.analysis.scaling import fitted_exponent
from stepscope.attention import cost
from stepscope.records.schema import Record
from stepscope.report.blocks import Cell, Column, Finding, Table
from stepscope.report.format import bytes_, number
from stepscope.studies.attention_workload import AttentionWorkload

_AT_THE_PEAK = {
    "forward": ("scores", "probabilities"),
    "backward": ("probabilities", "their gradient", "gradient of the scores"),
}
"""Tensors of length × length that are there at once: while the softmax runs, and while its
gradient is made."""
_WITHIN_SOFTMAX = "product within the softmax's backward"
"""CUDA's kernel takes probabilities times their gradient as a tensor."""
_LIBRARY = "work space of the matrix library"


def peak_lines(work: AttentionWorkload, on_cuda: bool = False) -> dict[str, int]:
    """Bytes of every tensor at the peak of the reference form."""
    wide, shape = work.element_bytes, work.shape
    lines = {
        "q, k, v": cost.input_bytes(shape, wide),
        "gradient of the output": cost.output_bytes(shape, wide),
        "output": cost.output_bytes(shape, wide),
    }
    lines |= dict.fromkeys(_squares(work.mode, on_cuda), cost.probability_bytes(shape, wide))
    if work.causal:
        lines["mask"] = cost.mask_bytes(shape, causal=True)
    if work.mode != "forward":
        lines["gradient of v"] = cost.output_bytes(shape, wide)
    return lines


def predicted_peak_bytes(work: AttentionWorkload, on_cuda: bool = False) -> int | None:
    """None for forms whose tensors we do not know one by one."""
    return sum(peak_lines(work, on_cuda).values()) if work.attention == "reference" else None


def squares(mode: str, on_cuda: bool) -> str:
    """`two (scores, probabilities)`: the tensors of length × length at the peak."""
    names = _squares(mode, on_cuda)
    return f"{('two', 'three', 'four')[len(names) - 2]} ({', '.join(names)})"


def _squares(mode: str, on_cuda: bool) -> tuple[str, ...]:
    if mode == "forward":
        return _AT_THE_PEAK["forward"]
    return (*_AT_THE_PEAK["backward"], *((_WITHIN_SOFTMAX,) if on_cuda else ()))


def off_by(pairs: Mapping[str, tuple[float, float]]) -> str:
    """Measured and predicted by name: how many agree, and the farthest."""
    exact = sum(held == predicted for held, predicted in pairs.values())
    name, (held, predicted) = max(pairs.items(), key=lambda pair: abs(pair[1][0] - pair[1][1]))
    text = f"to the byte in {exact} of {len(pairs)} cases"
    if exact == len(pairs):
        return text
    return f"{text}, off by {bytes_(abs(held - predicted))} at most ({name}: {bytes_(held)})"


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
        lines = _lines_of(largest)
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
            caption="The largest case of each pass that ran. Not accounted for: rounding of the"
            " allocator, and the work space of the matrix library (32 MiB for each thread that"
            " multiplies on a Hopper GPU) where it was not measured.",
        )


def _lines_of(record: Record) -> dict[str, int]:
    lines = peak_lines(
        msgspec.convert(record.config, AttentionWorkload),
        record.environment.device_kind == "cuda",
    )
    held = record.quantity("library_bytes")
    return lines | {_LIBRARY: int(held)} if held else lines


def memory_findings(label: str, records: Sequence[Record], longest: int) -> Iterator[Finding]:
    """How memory grows over the longest lengths, and how near the prediction is."""
    for name, what in (("saved_bytes", "leaves for its backward"), ("peak_bytes", "peaks at")):
        for varied, fixed, unit in (("seq", "head", "length"), ("head", "seq", "d")):
            held = [
                record
                for record in records
                if record.quantity(name)
                and (name != "saved_bytes" or record.config["mode"] == "forward")
            ]
            if not held:
                continue
            largest = max(record.config[fixed] for record in held)
            found = {
                float(record.config[varied]): record.quantity(name) or 0.0
                for record in held
                if record.config[fixed] == largest
            }
            points = sorted(found.items())[-longest if varied == "seq" else 0 :]
            if len(points) >= longest:
                exponent = fitted_exponent(*zip(*points, strict=True))
                yield Finding(
                    text=f"What the {label} {what} grows as {unit} to the power"
                    f" {number(exponent, 3)} over {points[0][0]:g} to {points[-1][0]:g}."
                )
    known = {
        f"d {record.config['head']}, length {record.config['seq']}": (
            peak, sum(_lines_of(record).values())
        )
        for record in records
        if record.config["attention"] == "reference" and (peak := record.quantity("peak_bytes"))
    }  # fmt: skip
    if known:
        yield Finding(
            text=f"The peak of the {label} is predicted from the tensors one by one:"
            f" {off_by(known)}."
        )
