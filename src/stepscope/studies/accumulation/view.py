"""Findings, tables and figures of the accumulation study. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from stepscope.analysis.floats import FORMATS, FloatFormat, align, float_format
from stepscope.errors import StepscopeError
from stepscope.records.schema import Record, Series
from stepscope.report.blocks import Block, Cell, Curve, Figure, Finding, Table
from stepscope.report.format import count, number, percent
from stepscope.report.tables import Declared, col, failed_table, table
from stepscope.studies.accumulation.cases import (
    OVERFLOWED,
    AccumulationCase,
    DotCase,
    HalvesCase,
    SquareCase,
    SumCase,
)
from stepscope.studies.base import Result, results_of
from stepscope.views.builders import capitalized, curve, finding

_COURSE = 1000


Sum = Result[SumCase]
Dot = Result[DotCase]
Square = Result[SquareCase]


def view(results: Sequence[Result[AccumulationCase]]) -> tuple[Block, ...]:
    done = [result for result in results if result.record.status == "ok"]
    sums, dots = results_of(done, SumCase), results_of(done, DotCase)
    squares = results_of(done, SquareCase)
    blocks: list[Block] = [*_sum_findings(sums), *_dot_findings(dots), *_square_findings(squares)]
    blocks += map(_half_batches, results_of(done, HalvesCase))
    if sums:
        blocks += [_sum_table(sums), _drift_figure(sums)]
    if dots:
        blocks.append(_dot_figure(dots))
    if squares:
        blocks.append(_square_table(squares))
    if done:
        blocks += [_formats_table(), _alignment_table()]
    return (*blocks, *failed_table("accumulation", [result.record for result in results]))


def _name(case: SumCase) -> str:
    terms, _, converted = case.terms.partition("-")
    how = ", converted first," if converted else ""
    return f"{terms} terms{how} in a {case.accumulator} accumulator"


def _value(result: Sum, name: str) -> float:
    return result.record.quantity(name) or 0.0


def _paired(record: Record, first: Series, second: Series) -> list[tuple[float, float]]:
    if len(first.values) != len(second.values):
        raise StepscopeError(
            f"record {record.id} has {len(first.values)} samples of {first.name} and"
            f" {len(second.values)} of {second.name}",
            "record it again",
        )
    return list(zip(first.values, second.values, strict=True))


def _sum_findings(sums: Sequence[Sum]) -> Iterator[Finding]:
    if not sums:
        return
    term = sums[0].case.term
    after = {_name(result.case): _value(result, "sum_1000") for result in sums}
    listed = "; ".join(f"{name} {total:.4f}" for name, total in after.items())
    yield finding(
        "accumulation.sums",
        f"{count(_COURSE)} additions of {term:g} should give {_COURSE * term:g}: {listed}.",
        sums,
        {"exact": _COURSE * term, **after},
    )
    narrow = [
        result
        for result in sums
        if result.case.accumulator == "float32" and not result.case.terms.startswith("float32")
    ]
    for result in narrow[:1]:
        terms, rounded = result.case.terms, _value(result, "term_held")
        yield finding(
            "accumulation.rounded-term",
            f"A float32 accumulator adds {terms} terms almost exactly; what remains is the"
            f" rounding of the term itself, which is {number(rounded, 7)} in {terms}"
            f" ({percent(rounded / term - 1)} off). Converting it before the addition changes"
            " nothing: the addition converts it anyway.",
            result,
            {"terms": terms, "term": rounded, "off": rounded / term - 1},
        )
    for result in sums:
        yield from _stalled(result)


def _half_batches(result: Result[HalvesCase]) -> Finding:
    """Why a step of two ranks is not that of one process bit by bit."""
    names = ("apart", "differing", "largest", "error_whole", "error_averaged")
    values = {name: result.record.quantity(name) or 0.0 for name in names}
    rows = result.case.rows
    differs = "is the same in every entry"
    if values["apart"]:
        share = number(values["apart"] / values["largest"], 2)
        differs = (
            f"differs from it in {percent(values['differing'])} of its entries, by at most"
            f" {number(values['apart'], 2)} ({share} of the largest entry)"
        )
    return finding(
        "accumulation.half-batches",
        f"The float32 gradient of a batch of {rows}, averaged from two half batches as two ranks"
        f" compute it, {differs}. Float32 addition is not associative: the halves are summed and"
        " rounded before they are added, so the terms are added in another order. Neither is the"
        f" wrong one: against float64 the full batch is off by {number(values['error_whole'], 2)}"
        f" and the average by {number(values['error_averaged'], 2)}.",
        result,
        {"rows": rows, "width": result.case.width, **values},
        timed=False,
    )


def _stalled(result: Sum) -> Iterator[Finding]:
    """Report a sum that no longer changes."""
    moved, planned = _value(result, "last_moved"), result.case.count
    dtype = float_format(result.case.accumulator)
    total, term = _value(result, "sum"), _value(result, "term_held")
    if moved >= planned or min(dtype.nearest(total), dtype.nearest(term)) <= 0:
        return
    gap = align(total, term, dtype).gap
    yield finding(
        "accumulation.stalled",
        f"{capitalized(_name(result.case))}: the sum stops growing at {total:g}"
        f" after {count(moved)} additions and stays there for the other"
        f" {count(planned - moved)}. The exponents of sum and term are {gap} apart and the"
        f" dtype has {dtype.mantissa_bits} mantissa bits: neighboring values are"
        f" {dtype.step_at(total):g} apart there, and less than half of that is rounded away.",
        result,
        {"accumulator": dtype.name, "sum": total, "additions": moved, "gap": gap},
        tone="warn",
    )


def _dot_findings(dots: Sequence[Dot]) -> Iterator[Finding]:
    for record, case in dots:
        device, by_hand = record.find("device"), record.find("in_format")
        if device is None or by_hand is None or not device.values:
            continue
        dtype = float_format(case.format)
        error, own = device.values[-1], by_hand.values[-1]
        yield finding(
            "accumulation.dot",
            f"A {case.format} matmul over {count(max(case.length))} terms on this device"
            f" is off by at most {percent(error)}, accumulated in {case.format} itself by"
            f" {percent(own)}; one rounding is {percent(dtype.epsilon / 2)}:"
            f" {_adds_in(dtype, error, own)}.",
            record,
            {"format": case.format, "length": max(case.length), "error": error, "own": own},
        )


def _adds_in(dtype: FloatFormat, error: float, own: float) -> str:
    """Infer the dtype of the device's accumulator from the errors."""
    if dtype.storage_bits == 16:
        wide = error <= dtype.epsilon < own
        return (
            f"it accumulates in {'a wider dtype and rounds once' if wide else 'the dtype itself'}"
        )
    if dtype.mantissa_bits < FORMATS["float32"].mantissa_bits:
        return "the inputs are rounded, which averages out, and the sum is accumulated in float32"
    if error < own / 2:
        return "many short sums lose less than one long sum"
    return "it loses as much as one long sum"


def _square_findings(squares: Sequence[Square]) -> Iterator[Finding]:
    for record, case in squares:
        dtype = float_format(case.format)
        value, square = record.find("value"), record.find("square")
        naive, exact = record.quantity("variance"), record.quantity("variance_exact")
        if value is None or square is None:
            continue
        pairs = _paired(record, value, square)
        lost = [v for v, s in pairs if s == 0.0]
        burst = [v for v, s in pairs if s == OVERFLOWED]
        least, most = dtype.squares
        tried = [
            *([f"that of {max(lost):g} underflows"] if lost else []),
            *([f"that of {min(burst):g} overflows"] if burst else []),
        ]
        text = dtype.name
        if tried:
            text += f": squares underflow up to {least:.3g} and overflow from {most:.3g} on"
            text += f" (tried: {', '.join(tried)})"
        if naive is not None and exact:
            text += (
                f"{';' if tried else ':'} the variance of numbers around 100 comes out as"
                f" {number(naive)} instead of {number(exact)} if the squares are averaged in this"
                " dtype. That is why a norm's reductions need float32"
                if abs(naive / exact - 1) > 0.05
                else f"; a variance of {number(exact)} around 100 comes out as {number(naive)}"
            )
        yield finding(
            "accumulation.squares",
            f"{text}.",
            record,
            {"format": dtype.name, "vanish": least, "overflow": most, "variance": naive},
        )


def _sum_table(sums: Sequence[Sum]) -> Table:
    return table(
        "accumulation-sums",
        "The same number added repeatedly",
        sums,
        [
            col("terms", lambda r: r.case.terms),
            col("accumulator", lambda r: r.case.accumulator),
            col("after 1000", lambda r: f"{_value(r, 'sum_1000'):.4f}"),
            col("additions", lambda r: r.case.count, "count"),
            col("sum", lambda r: _value(r, "sum"), "number"),
            col(
                "off",
                lambda r: _value(r, "sum") / (r.case.count * r.case.term) - 1,
                "percent",
                hint="from the exact sum",
            ),
            col(
                "last moved at",
                lambda r: int(_value(r, "last_moved")),
                "count",
                hint="the last addition that changed it",
            ),
            col(
                "must stop at",
                lambda r: float_format(r.case.accumulator).stalls_at(
                    _value(r, "term_held") or r.case.term
                ),
                "number",
                hint="where half a step of the accumulator reaches the term",
            ),
        ],
    )


def _drift_figure(sums: Sequence[Sum]) -> Figure:
    curves = []
    for record, case in sums:
        partial, at = record.find("partial"), record.find("at")
        if partial is not None and at is not None:
            points = ((n, s / (n * case.term)) for s, n in _paired(record, partial, at))
            curves.append(curve(f"{case.terms} in {case.accumulator}", points))
    return Figure(
        name="accumulation-drift",
        title="A growing sum relative to the exact value",
        curves=tuple(curves),
        x_label="additions",
        y_label="sum, × exact",
        x_log=True,
    )


def _dot_figure(dots: Sequence[Dot]) -> Figure:
    curves = []
    for record, case in dots:
        lengths = tuple(map(float, case.length))
        for name, words in (("device", "on the device"), ("in_format", "accumulated in the dtype")):
            series = record.find(name)
            if series is not None:
                if len(series.values) != len(lengths):
                    raise StepscopeError(
                        f"record {record.id} has {len(series.values)} samples of {name} for"
                        f" {len(lengths)} lengths",
                        "record it again",
                    )
                # A logarithmic axis has no zero.
                y = tuple(max(value, 1e-9) for value in series.values)
                curves.append(Curve(label=f"{case.format} {words}", x=lengths, y=y))
    return Figure(
        name="accumulation-dot",
        title="Error of a dot product by length",
        curves=tuple(curves),
        x_label="terms",
        y_label="largest relative error",
        x_log=True,
        y_log=True,
    )


def _square_table(squares: Sequence[Square]) -> Table:
    value = squares[0].record.find("value")
    squared = {case.format: record.find("square") for record, case in squares}

    def column(dtype: str, series: Series | None) -> Declared:
        def cell(row: tuple[int, float]) -> Cell:
            value = series.values[row[0]] if series is not None else None
            return "overflow" if value == OVERFLOWED else value

        return col(f"x² in {dtype}", cell, "number")

    return table(
        "accumulation-squares",
        "Squares near the ends of the range",
        enumerate(value.values if value is not None else ()),
        [
            col("x", lambda row: f"{row[1]:g}"),
            *(column(dtype, series) for dtype, series in squared.items()),
        ],
        caption="Gradients and deviations are squared in norms, variances and AdamW.",
    )


def _formats_table() -> Table:
    return table(
        "accumulation-formats",
        "The dtypes",
        FORMATS.values(),
        [
            col("dtype", lambda f: f.name),
            col("exponent", lambda f: f.exponent_bits, "count", unit="bits"),
            col("mantissa", lambda f: f.mantissa_bits, "count", unit="bits"),
            col("stored", lambda f: f.storage_bits, "count", unit="bits"),
            col("largest", lambda f: f.largest, "number"),
            col("smallest normal", lambda f: f.smallest_normal, "number"),
            col("smallest", lambda f: f.smallest, "number"),
            col("step near 1", lambda f: f.epsilon, "number"),
            col("step near 1000", lambda f: f.step_at(1000.0), "number"),
        ],
        caption="bfloat16 has the range of float32 with fewer digits; float16 has more digits and a"
        " narrow range. TF32 is float32 in memory and rounded on its way into the tensor core.",
    )


def _alignment_table() -> Table:
    rows: list[tuple[str, ...]] = []
    for name in ("float32", "float16", "bfloat16"):
        drawn = align(1000.0, 0.01, FORMATS[name])
        own = drawn.exponent - drawn.gap
        rows += [
            (name, "1000", drawn.larger, f"2^{drawn.exponent}"),
            (name, "0.01", drawn.smaller, f"2^{own}"),
            (name, f"0.01, shifted by {drawn.gap} bits", drawn.shifted, f"2^{drawn.exponent}"),
            (name, f"sum: {drawn.result:.7g}", drawn.total, f"2^{drawn.exponent}"),
        ]
    return table(
        "accumulation-alignment",
        "1000 + 0.01, bit by bit",
        rows,
        [
            col("dtype", itemgetter(0)),
            col("number", itemgetter(1)),
            col("digits", itemgetter(2), "code"),
            col("times", itemgetter(3), "code"),
        ],
        caption="An adder shifts the smaller number to the right until the exponents agree; the bar"
        " is where the dtype's digits end. The digits behind it only decide the rounding:"
        " float16 and bfloat16 have nothing left before it.",
    )
