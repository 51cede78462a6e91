"""What the sums say: findings, the formats, the curves. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.analysis.floats import FORMATS, align, format_of
from stepscope.errors import StepscopeError
from stepscope.records.schema import Record, Series
from stepscope.report.blocks import Block, Cell, Column, Curve, Figure, Finding, Table
from stepscope.report.format import count, number, percent
from stepscope.studies.accumulation import OVERFLOWED

_COURSE = 1000


def accumulation_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    done = [record for record in records if record.status == "ok"]
    sums, dots, squares = (
        [record for record in done if record.config["part"] == part]
        for part in ("sum", "dot", "square")
    )
    lost = [record for record in records if record.status != "ok"]
    blocks: list[Block] = [*_sum_findings(sums), *_dot_findings(dots), *_square_findings(squares)]
    if sums:
        blocks += [_sum_table(sums), _drift_figure(sums)]
    if dots:
        blocks.append(_dot_figure(dots))
    if squares:
        blocks.append(_square_table(squares))
    if done:
        blocks += [_formats_table(), _alignment_table()]
    if lost:
        blocks.append(_lost_table(lost))
    return tuple(blocks)


def _name(record: Record) -> str:
    terms, _, converted = record.config["terms"].partition("-")
    how = ", converted first," if converted else ""
    return f"{terms} terms{how} in a {record.config['accumulator']} accumulator"


def _held(record: Record, name: str) -> float:
    return record.quantity(name) or 0.0


def _paired(record: Record, first: Series, second: Series) -> list[tuple[float, float]]:
    if len(first.values) != len(second.values):
        raise StepscopeError(
            f"record {record.id} has {len(first.values)} samples of {first.name} and"
            f" {len(second.values)} of {second.name}",
            "record it again",
        )
    return list(zip(first.values, second.values, strict=True))


def _sum_findings(sums: Sequence[Record]) -> Iterator[Finding]:
    if not sums:
        return
    term = sums[0].config["term"]
    exact = _COURSE * term
    listed = "; ".join(f"{_name(r)} {_held(r, 'sum_1000'):.4f}" for r in sums)
    yield Finding(text=f"{count(_COURSE)} additions of {term:g} should give {exact:g}: {listed}.")
    rounded = [r for r in sums if r.config["accumulator"] == "float32"]
    narrow = [r for r in rounded if not r.config["terms"].startswith("float32")]
    if narrow:
        terms, held = narrow[0].config["terms"], _held(narrow[0], "term_held")
        yield Finding(
            text=f"A float32 accumulator adds {terms} terms almost exactly; what is left is the"
            f" rounding of the term itself, which {terms} holds as {number(held, 7)}"
            f" ({percent(held / term - 1)} off). Converting it before the addition changes nothing:"
            " the addition does that."
        )
    for record in sums:
        moved, planned = _held(record, "last_moved"), record.config["count"]
        form = format_of(record.config["accumulator"])
        total, term = _held(record, "sum"), _held(record, "term_held")
        if moved < planned and min(form.nearest(total), form.nearest(term)) > 0:
            gap = align(total, term, form).gap
            yield Finding(
                text=f"{_name(record)[:1].upper()}{_name(record)[1:]}: the sum stops at {total:g}"
                f" after {count(moved)} additions and stays there for the other"
                f" {count(planned - moved)}. The exponents of sum and term are {gap} apart and the"
                f" format has {form.mantissa_bits} digits behind the point: neighbours are"
                f" {form.step_at(total):g} apart there, and what is below half of that is rounded"
                " away.",
                tone="warn",
            )


def _dot_findings(dots: Sequence[Record]) -> Iterator[Finding]:
    for record in dots:
        device, by_hand = record.find("device"), record.find("in_format")
        if device is None or by_hand is None or not device.values:
            continue
        longest, form = max(record.config["length"]), format_of(record.config["format"])
        error, own = device.values[-1], by_hand.values[-1]
        half_step = form.epsilon / 2
        if form.storage_bits == 16:
            wide = error <= 2 * half_step < own
            verdict = f"it adds in {'a wider format and rounds once' if wide else 'the format'}"
        elif form.mantissa_bits < FORMATS["float32"].mantissa_bits:
            verdict = "the inputs are rounded, which averages out, and the sum is kept in float32"
        elif error < own / 2:
            verdict = "many short sums lose less than one long one"
        else:
            verdict = "it loses as much as one long sum"
        yield Finding(
            text=f"A {record.config['format']} product over {count(longest)} terms on this device"
            f" is off by {percent(error)} at most, added in {record.config['format']} itself by"
            f" {percent(own)}; one rounding is {percent(half_step)}: {verdict}."
        )


def _square_findings(squares: Sequence[Record]) -> Iterator[Finding]:
    for record in squares:
        form = format_of(record.config["format"])
        value, square = record.find("value"), record.find("square")
        naive, exact = record.quantity("variance"), record.quantity("variance_exact")
        if value is None or square is None:
            continue
        pairs = _paired(record, value, square)
        lost = [v for v, s in pairs if s == 0.0]
        burst = [v for v, s in pairs if s == OVERFLOWED]
        least, most = form.squares
        tried = [
            *([f"that of {max(lost):g} vanishes"] if lost else []),
            *([f"that of {min(burst):g} overflows"] if burst else []),
        ]
        text = form.name
        if tried:
            text += f": squares vanish up to {least:.3g} and overflow from {most:.3g} on"
            text += f" (tried: {', '.join(tried)})"
        if naive is not None and exact:
            text += (
                f"{';' if lost or burst else ':'} the variance of numbers around 100 comes out as"
                f" {number(naive)} where it is {number(exact)}, if the squares are averaged in this"
                " format. That is why a norm's reductions need float32"
                if abs(naive / exact - 1) > 0.05
                else f"; a variance of {number(exact)} around 100 comes out as {number(naive)}"
            )
        yield Finding(text=text + ".")


def _sum_table(sums: Sequence[Record]) -> Table:
    def row(record: Record) -> tuple[Cell, ...]:
        exact = record.config["count"] * record.config["term"]
        total = _held(record, "sum")
        form = format_of(record.config["accumulator"])
        early = f"{_held(record, 'sum_1000'):.4f}"
        return (
            record.config["terms"], record.config["accumulator"], early,
            record.config["count"], total, total / exact - 1, int(_held(record, "last_moved")),
            form.stalls_at(_held(record, "term_held") or record.config["term"]),
        )  # fmt: skip

    return Table(
        name="accumulation-sums",
        title="The same number added again and again",
        columns=(
            Column(title="terms"),
            Column(title="accumulator"),
            Column(title="after 1000"),
            Column(title="additions", kind="count"),
            Column(title="sum", kind="number"),
            Column(title="off", kind="percent", hint="from the exact sum"),
            Column(title="last moved at", kind="count", hint="the addition that changed it last"),
            Column(
                title="must stop at", kind="number",
                hint="where half a step of the accumulator reaches the term",
            ),
        ),
        rows=tuple(row(record) for record in sums),
    )  # fmt: skip


def _drift_figure(sums: Sequence[Record]) -> Figure:
    curves = []
    for record in sums:
        partial, at = record.find("partial"), record.find("at")
        if partial is not None and at is not None:
            term = record.config["term"]
            curves.append(
                Curve(
                    label=f"{record.config['terms']} in {record.config['accumulator']}",
                    x=at.values,
                    y=tuple(s / (n * term) for s, n in _paired(record, partial, at)),
                )
            )
    return Figure(
        name="accumulation-drift",
        title="A sum over the truth, as it grows",
        kind="lines",
        curves=tuple(curves),
        x_label="additions",
        y_label="sum, × exact",
        x_log=True,
    )


def _dot_figure(dots: Sequence[Record]) -> Figure:
    curves = []
    for record in dots:
        lengths = tuple(float(n) for n in record.config["length"])
        for name, words in (("device", "on the device"), ("in_format", "added in the format")):
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
                curves.append(Curve(label=f"{record.config['format']} {words}", x=lengths, y=y))
    return Figure(
        name="accumulation-dot",
        title="Error of a dot product against its length",
        kind="lines",
        curves=tuple(curves),
        x_label="terms",
        y_label="largest relative error",
        x_log=True,
        y_log=True,
    )


def _square_table(squares: Sequence[Record]) -> Table:
    value = squares[0].find("value")
    values = value.values if value is not None else ()
    found = {r.config["format"]: r.find("square") for r in squares}

    def cell(form: str, place: int) -> Cell:
        series = found[form]
        square = series.values[place] if series is not None else None
        return "overflow" if square == OVERFLOWED else square

    return Table(
        name="accumulation-squares",
        title="Squares near the ends of the range",
        columns=(
            Column(title="x"),
            *(Column(title=f"x² in {form}", kind="number") for form in found),
        ),
        rows=tuple(
            (f"{x:g}", *(cell(form, place) for form in found)) for place, x in enumerate(values)
        ),
        caption="Gradients and deviations are squared in norms, variances and AdamW.",
    )


def _formats_table() -> Table:
    return Table(
        name="accumulation-formats",
        title="The number formats",
        columns=(
            Column(title="format"),
            Column(title="exponent", kind="count", unit="bits"),
            Column(title="mantissa", kind="count", unit="bits"),
            Column(title="stored", kind="count", unit="bits"),
            Column(title="largest", kind="number"),
            Column(title="smallest normal", kind="number"),
            Column(title="smallest", kind="number"),
            Column(title="step near 1", kind="number"),
            Column(title="step near 1000", kind="number"),
        ),
        rows=tuple(
            (
                f.name, f.exponent_bits, f.mantissa_bits, f.storage_bits, f.largest,
                f.smallest_normal, f.smallest, f.epsilon, f.step_at(1000.0),
            )
            for f in FORMATS.values()
        ),
        caption="bfloat16 has the range of float32 with fewer digits; float16 has more digits and a"
        " narrow range. TF32 is float32 in memory and rounded on its way into the matrix unit.",
    )  # fmt: skip


def _alignment_table() -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name in ("float32", "float16", "bfloat16"):
        drawn = align(1000.0, 0.01, FORMATS[name])
        own = drawn.exponent - drawn.gap
        rows += [
            (name, "1000", drawn.larger, f"2^{drawn.exponent}"),
            (name, "0.01", drawn.smaller, f"2^{own}"),
            (name, f"0.01, {drawn.gap} places later", drawn.shifted, f"2^{drawn.exponent}"),
            (name, f"sum: {drawn.result:.7g}", drawn.total, f"2^{drawn.exponent}"),
        ]
    return Table(
        name="accumulation-alignment",
        title="1000 + 0.01, bit by bit",
        columns=(
            Column(title="format"),
            Column(title="number"),
            Column(title="digits", kind="code"),
            Column(title="times", kind="code"),
        ),
        rows=tuple(rows),
        caption="An adder moves the smaller number to the right until the exponents agree; the bar"
        " is where the format's digits end. What stands behind it only decides the rounding:"
        " float16 and bfloat16 have nothing left before it.",
    )


def _lost_table(lost: Sequence[Record]) -> Table:
    return Table(
        name="accumulation-lost",
        title="Cases without a result",
        columns=(Column(title="case"), Column(title="status"), Column(title="reason")),
        rows=tuple((record.case, record.status, record.reason) for record in lost),
    )
