"""Growth and memory of naive attention, and the first length that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from stepscope.analysis.limits import median_ms, step_ms
from stepscope.analysis.scaling import fitted_exponent
from stepscope.attention import cost
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Cell, Curve, Figure, Finding, Table, Tone, Value
from stepscope.report.format import bytes_, number
from stepscope.report.tables import STATUS, col, table
from stepscope.studies.attention.cases import AttentionCase
from stepscope.studies.attention.workload import AttentionWorkload
from stepscope.studies.base import Result
from stepscope.views.builders import finding, grouped, sampled_curve

_LONGEST = 3
"""Number of longest lengths for the fit: short ones are dominated by CPU time and fixed costs."""
_AT_THE_PEAK = {
    "forward": ("scores", "probabilities"),
    "backward": ("probabilities", "their gradient", "gradient of the scores"),
}
"""Tensors of length × length that exist at once: during the softmax and during its backward."""
_WITHIN_SOFTMAX = "temporary of the softmax's backward"
"""On CUDA, probabilities times their gradient is a separate tensor."""
_LIBRARY = "cuBLAS workspace"

Pass = Result[AttentionCase]


def view(results: Sequence[Pass]) -> tuple[Block, ...]:
    timed = [result for result in results if step_ms(result.record)]
    return (
        *_findings(results, timed),
        *_figures(timed),
        _times_table(results),
        *_peak_table(results),
    )


def peak_lines(work: AttentionWorkload, on_cuda: bool = False) -> dict[str, int]:
    """Bytes of every tensor at the peak of naive attention."""
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


def predicted_peak_bytes(work: AttentionWorkload, on_cuda: bool = False) -> int:
    """Peak memory of naive attention, predicted from its tensors."""
    return sum(peak_lines(work, on_cuda).values())


def _squares(mode: str, on_cuda: bool) -> tuple[str, ...]:
    if mode == "forward":
        return _AT_THE_PEAK["forward"]
    return (*_AT_THE_PEAK["backward"], *((_WITHIN_SOFTMAX,) if on_cuda else ()))


def _counted_squares(mode: str, on_cuda: bool) -> str:
    names = _squares(mode, on_cuda)
    return f"{('two', 'three', 'four')[len(names) - 2]} ({', '.join(names)})"


def _on_cuda(record: Record) -> bool:
    return record.environment.device_kind == "cuda"


def _lines_of(result: Pass) -> dict[str, int]:
    lines = peak_lines(result.case, _on_cuda(result.record))
    workspace = result.record.quantity("library_bytes")
    return lines | {_LIBRARY: int(workspace)} if workspace else lines


def _findings(results: Sequence[Pass], timed: Sequence[Pass]) -> Iterator[Finding]:
    for label, members in grouped(timed, lambda result: _pass(result.case)).items():
        yield from _growth_of_memory(label, members)
        peaks = {
            f"d {result.case.head}, length {result.case.seq}": _Predicted(
                result.record, peak, sum(_lines_of(result).values())
            )
            for result in members
            if result.case.attention == "reference"
            and (peak := result.record.quantity("peak_bytes"))
        }
        if peaks:
            yield _prediction(
                "attention.predicted-peak",
                f"Peak memory of the {label}, predicted as a sum of tensors",
                peaks,
            )
    saved = {
        _named(result.case): _Predicted(result.record, measured, predicted)
        for result in timed
        if (measured := result.record.quantity("saved_bytes"))
        and (predicted := result.record.quantity("predicted_saved_bytes"))
    }
    if saved:
        yield _prediction(
            "attention.predicted-saved",
            "Bytes saved for backward, predicted from the shapes",
            saved,
        )
    yield from _limit(results)


def _named(case: AttentionCase) -> str:
    return f"{case.attention} {case.dtype}, d {case.head}, length {case.seq}, {case.mode}"


def _pass(case: AttentionCase) -> str:
    """Name of a pass: its mode and the settings that differ from the default."""
    extras = [
        *([] if case.attention == "reference" else [case.attention]),
        *([] if case.dtype == "float32" else [case.dtype]),
        *(["causal"] if case.causal else []),
    ]
    return f"{case.mode} pass" + (f" ({', '.join(extras)})" if extras else "")


class _Growth(NamedTuple):
    """A quantity over the length or head dimension, at the largest value of the other."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    at: int
    records: tuple[Record, ...]

    @property
    def exponent(self) -> float:
        return fitted_exponent(self.x, self.y)

    @property
    def text(self) -> str:
        return f"to the power {number(self.exponent, 3)} over {self.x[0]:g} to {self.x[-1]:g}"

    def values(self, label: str) -> dict[str, Value]:
        exponent, first, last = self.exponent, self.x[0], self.x[-1]
        return {"pass": label.replace(" pass", ""), "exponent": exponent, "from": first, "to": last}


def _growth(
    results: Sequence[Pass], varied: str, value: Callable[[Record], float | None]
) -> _Growth | None:
    """Growth over the longest lengths, or over all head dimensions."""
    fixed = "head" if varied == "seq" else "seq"
    measured = [result for result in results if value(result.record)]
    if not measured:
        return None
    at = max(getattr(result.case, fixed) for result in measured)
    points = {
        float(getattr(result.case, varied)): result.record
        for result in measured
        if getattr(result.case, fixed) == at
    }
    x = tuple(sorted(points)[-_LONGEST if varied == "seq" else 0 :])
    if len(x) < _LONGEST:
        return None
    records = tuple(points[size] for size in x)
    return _Growth(x, tuple(value(record) or 0.0 for record in records), at, records)


def _growth_of_memory(label: str, results: Sequence[Pass]) -> Iterator[Finding]:
    forward = [result for result in results if result.case.mode == "forward"]
    for name, what, members in (
        ("saved_bytes", "memory saved for backward by", forward),
        ("peak_bytes", "peak memory of", results),
    ):
        for varied, unit in (("seq", "length"), ("head", "d")):
            growth = _growth(members, varied, partial(Record.quantity, name=name))
            if growth:
                yield finding(
                    "attention.memory-growth",
                    f"The {what} the {label} grows as {unit} {growth.text}.",
                    growth.records,
                    growth.values(label) | {"quantity": name, "by": unit},
                )


class _Predicted(NamedTuple):
    """A measured value in bytes and its prediction."""

    record: Record
    measured: float
    predicted: float

    @property
    def off(self) -> float:
        return abs(self.measured - self.predicted)


def _prediction(code: str, what: str, cases: Mapping[str, _Predicted]) -> Finding:
    """Count the exact predictions and report the largest error."""
    exact = sum(case.off == 0 for case in cases.values())
    name, farthest = max(cases.items(), key=lambda pair: pair[1].off)
    text = f"{what}: exact in {exact} of {len(cases)} cases"
    if exact < len(cases):
        text += f", off by {bytes_(farthest.off)} at most ({name}: {bytes_(farthest.measured)})"
    values: dict[str, Value] = {"exact": exact, "cases": len(cases)}
    values |= {"off_bytes": farthest.off, "case": name}
    return finding(code, f"{text}.", cases.values(), values)


def _limit(results: Sequence[Pass]) -> Iterator[Finding]:
    """Report the tensors that fill the memory and the first length that does not fit."""
    naive = [result for result in results if result.case.attention == "reference"]
    if not naive:
        return
    largest = max(naive, key=lambda result: result.case.seq)
    work, memory = largest.case, largest.record.environment.device_memory_bytes
    on_cuda = _on_cuda(largest.record)
    scores = cost.probability_bytes(work.shape, work.element_bytes)
    text = (
        f"At length {work.seq} one tensor of scores takes {bytes_(scores)}"
        f" ({work.batch} × {work.heads} × {work.seq}² × {work.element_bytes} B). The peak of the"
        f" forward pass has {_counted_squares('forward', on_cuda)} such tensors, that of the"
        f" backward pass {_counted_squares('backward', on_cuda)}; the output at d {work.head} takes"
        f" {bytes_(cost.output_bytes(work.shape, work.element_bytes))}."
    )
    values: dict[str, Value] = {"length": work.seq, "scores_bytes": scores, "memory_bytes": memory}
    failed = [result for result in naive if result.record.status == "oom"]
    first = min(failed, key=lambda result: result.case.seq, default=None)
    if first:
        needed = predicted_peak_bytes(first.case, on_cuda)
        values |= {"first": _named(first.case), "needed_bytes": needed}
        text += (
            f" The first case that does not fit into {bytes_(memory)} is {_named(first.case)},"
            f" whose tensors need {bytes_(needed)} at once"
        )
        if needed <= memory:
            text += "; the rest is lost to fragmentation of the allocator"
        text += "."
    elif on_cuda:
        fits, beyond = _first_beyond(work, memory)
        values |= {"fits": fits.seq, "beyond": beyond.seq}
        text += (
            f" All cases fit into {bytes_(memory)}; length {fits.seq} would fit too"
            f" ({bytes_(predicted_peak_bytes(fits, True))}), but the backward pass of"
            f" {beyond.seq} needs {bytes_(predicted_peak_bytes(beyond, True))}."
        )
    cited = [result for result in (largest, first) if result]
    tone: Tone = "warn" if failed else "info"
    yield finding("attention.memory-limit", text, cited, values, tone=tone)


def _first_beyond(work: AttentionCase, memory: int) -> tuple[AttentionCase, AttentionCase]:
    """The last length that fits and the first that does not, predicted by doubling the length."""
    fits = work = msgspec.structs.replace(work, mode="backward")
    while predicted_peak_bytes(work, True) <= memory:
        fits, work = work, msgspec.structs.replace(work, seq=2 * work.seq)
    return fits, work


class _Row(NamedTuple):
    """Forward and backward of one attention implementation at one shape."""

    case: AttentionCase
    passes: dict[str, Record]

    def time(self, mode: str, statistic: str) -> Cell:
        record = self.passes.get(mode)
        if record is None:
            return None
        if record.status != "ok":
            return STATUS.get(record.status, record.status) if statistic == "mean" else None
        if statistic == "issued in":
            return median_ms(record, "issue", "host")
        summary = step_ms(record)
        return getattr(summary, statistic) if summary else None

    def bytes(self, name: str) -> float | None:
        return (self.passes.get("backward") or self.passes["forward"]).quantity(name)


def _times_table(results: Sequence[Pass]) -> Table:
    rows: dict[tuple[object, ...], _Row] = {}
    for record, case in results:
        key = (case.attention, case.dtype, case.causal, case.head, case.seq)
        rows.setdefault(key, _Row(case, {})).passes[case.mode] = record
    issued = "CPU time to issue the pass; on a CPU the same as the time"
    predicted = "saved bytes predicted from the shapes"
    columns = [
        col("attention", lambda r: r.case.attention),
        col("dtype", lambda r: r.case.dtype),
        col("mask", lambda r: "causal" if r.case.causal else "full"),
        col("d", lambda r: r.case.head, "count"),
        col("length", lambda r: r.case.seq, "count"),
        *(
            col(
                f"{mode} {name}",
                partial(_Row.time, mode=mode, statistic=name),
                unit="ms",
                hint=hint,
            )
            for mode in ("forward", "backward")
            for name, hint in (("mean", ""), ("std", ""), ("issued in", issued))
        ),
        col("saved", lambda r: r.bytes("saved_bytes"), "bytes", hint="for backward"),
        col("predicted", lambda r: r.bytes("predicted_saved_bytes"), "bytes", hint=predicted),
        col("peak", lambda r: r.bytes("peak_bytes"), "bytes"),
    ]
    return table(
        "attention-times",
        "Forward, backward, memory",
        rows.values(),
        columns,
        caption="The backward pass is timed alone, from an existing output gradient.",
    )


def _peak_table(results: Sequence[Pass]) -> Iterator[Table]:
    """Predicted tensors of the largest case of each pass against the measured peak."""
    rows: list[tuple[str, str, float, float | None]] = []
    for mode in _AT_THE_PEAK:
        measured = [
            (peak, result)
            for result in results
            if (result.case.attention, result.case.mode) == ("reference", mode)
            and (peak := result.record.quantity("peak_bytes"))
        ]
        if not measured:
            continue
        peak, largest = max(measured, key=lambda pair: pair[0])
        title = f"{mode}, d {largest.case.head}, length {largest.case.seq}"
        lines = _lines_of(largest)
        rows += [(title, name, size, size / peak) for name, size in lines.items()]
        rows.append((title, "unattributed", peak - sum(lines.values()), None))
        rows.append((title, "measured peak", peak, 1.0))
    if rows:
        yield table(
            "attention-peak",
            "Tensors in memory at the peak",
            rows,
            [
                col("pass", lambda r: r[0]),
                col("tensor", lambda r: r[1]),
                col("bytes", lambda r: r[2], "bytes"),
                col("share of peak", lambda r: r[3], "percent"),
            ],
            caption="The largest case of each pass that ran. Unattributed: rounding of the"
            " allocator, and the cuBLAS workspace (32 MiB per calling thread on a Hopper GPU)"
            " where it was not measured.",
        )


def _figures(timed: Sequence[Pass]) -> Iterator[Figure]:
    for mode in ("forward", "backward"):
        curves = tuple(_curves([result for result in timed if result.case.mode == mode]))
        if any(len(curve.x) > 1 for curve in curves):
            yield Figure(
                name=f"attention-{mode}",
                title=f"Time of the {mode} pass over sequence length",
                curves=curves,
                x_label="sequence length, tokens",
                y_label=f"{mode} pass, ms",
                x_log=True,
                y_log=True,
                caption="Median of the samples; bars show the interquartile range.",
            )


def _curves(timed: Sequence[Pass]) -> Iterator[Curve]:
    varying = [
        name
        for name in ("attention", "dtype")
        if len({getattr(result.case, name) for result in timed}) > 1
    ]

    def label(result: Pass) -> str:
        names = (getattr(result.case, name) for name in varying)
        return " ".join((*names, f"d {result.case.head}"))

    for name, members in grouped(sorted(timed, key=lambda r: r.case.seq), label).items():
        points = ((float(r.case.seq), step) for r in members if (step := step_ms(r.record)))
        yield sampled_curve(name, points)
