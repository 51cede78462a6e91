"""Findings and tables of the autocast study. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Finding, Table, Value
from stepscope.report.format import bytes_, count, percent
from stepscope.report.tables import Declared, col, cols, failed_table, table
from stepscope.studies.autocast.cases import AutocastCase, Formats, Operators
from stepscope.studies.base import Result
from stepscope.views.builders import capitalized, finding, grouped

_ENDS = ("parameters", "logits", "loss", "gradients")
_FORMATS = ("float16", "bfloat16", "float32")
_CAST = "_to_copy"

Row = Result[AutocastCase]


def view(rows: Sequence[Row]) -> tuple[Block, ...]:
    done = [
        row for row in rows if row.record.status == "ok" and "formats" in row.record.attachments
    ]
    subjects = grouped(done, lambda row: row.case.subject).values()
    tables = (_formats_table(done), _reductions_table(done), *map(_operators_table, done))
    return (
        *(block for members in subjects for block in _findings(members)),
        *_norm_finding(done),
        *(tables if done else ()),
        *failed_table("autocast", [row.record for row in rows]),
    )


def _subject(row: Row) -> str:
    subject = row.case.subject
    return "the small network of the course" if subject == "toy" else f"the {subject} model"


def _title(row: Row) -> str:
    return f"{_subject(row)} under {row.case.dtype} autocast"


def kept_wide(record: Record) -> list[str]:
    """Operators of the forward pass that read float32 and do more than cast."""
    operators = record.required("forward", Operators)
    return sorted(
        {o.operator for o in operators if o.inputs == ("float32",) and o.operator != _CAST}
    )


def _findings(rows: Sequence[Row]) -> Iterator[Finding]:
    """Findings of one subject, for all its autocast dtypes together."""
    under = " and ".join(row.case.dtype for row in rows)
    subject = _subject(rows[0])
    formats = [row.record.required("formats", Formats) for row in rows]
    named = {
        name: " / ".join(dict.fromkeys(dtypes.get(name, "") for dtypes in formats))
        for name in formats[0]
    }
    ends = {name: named[name] for name in _ENDS if name in named}
    inner = [f"{name} {named[name]}" for name in named if name not in _ENDS]
    listed = (
        f" Outputs of its modules: {', '.join(inner)}." if rows[0].case.subject == "toy" else ""
    )
    yield finding(
        "autocast.dtypes",
        f"{capitalized(subject)} under {under} autocast:"
        f" {', '.join(f'{name} {dtype}' for name, dtype in ends.items())}.{listed}",
        rows,
        {"subject": rows[0].case.subject, **ends},
        timed=False,
    )
    yield from _on_cuda(rows)
    casts = [row.record.quantity("casts") or 0 for row in rows]
    sizes = [row.record.quantity("cast_bytes") or 0 for row in rows]
    listed_casts = dict.fromkeys(
        f"{count(times)} casts, {bytes_(size)}" for times, size in zip(casts, sizes, strict=True)
    )
    shares = [share for row in rows if (share := _casts_share(row.record)) is not None]
    text = f"In one step of {subject} there are {' / '.join(listed_casts)} read and written"
    if shares:
        listed = " / ".join(dict.fromkeys(map(percent, shares)))
        text += f"; on their own they take {listed} of the step's time"
    wide = sorted({name for row in rows for name in kept_wide(row.record)})
    if wide:
        text += f". Operators of the forward pass in float32: {', '.join(wide)}"
    values: dict[str, Value] = {"subject": rows[0].case.subject, "casts": casts[0]}
    values |= {"bytes": sizes[0], "share": shares[0] if shares else None}
    yield finding("autocast.casts", f"{text}.", rows, values | {"float32": ", ".join(wide)})


def _on_cuda(rows: Sequence[Row]) -> Iterator[Finding]:
    """The dtypes by CUDA's rules, and where they differ from those of this device."""
    known = [row for row in rows if _cuda_formats(row)]
    if not known:
        return
    names = list(_cuda_formats(known[0]))
    alike = {
        name: " / ".join(dict.fromkeys(_cuda_formats(row).get(name, "") for row in known))
        for name in names
    }
    differs = [
        name
        for name in names
        if any(
            _cuda_formats(row).get(name) != row.record.required("formats", Formats).get(name)
            for row in known
        )
    ]
    shown = names if rows[0].case.subject == "toy" else [n for n in names if n in _ENDS]
    listed = ", ".join(f"{name} {alike[name]}" for name in shown)
    difference = (
        f"This device differs in {', '.join(differs)}" if differs else "This device has the same"
    )
    yield finding(
        "autocast.cuda-dtypes",
        f"On CUDA {_subject(rows[0])} would have, by the rules of its autocast: {listed}."
        f" {difference}.",
        known,
        {"subject": rows[0].case.subject, **alike, "differs": ", ".join(differs)},
        timed=False,
    )


def _cuda_formats(row: Row) -> Formats:
    """Derived dtypes; empty on a GPU and in older records."""
    return row.record.attachment("cuda_formats", Formats) or {}


def _casts_share(record: Record) -> float | None:
    step, replayed = record.find("step"), record.find("casts")
    if step is None or replayed is None or not step.values or not replayed.values:
        return None
    return summarize(replayed.values).median / summarize(step.values).median


def _norm_finding(rows: Sequence[Row]) -> Iterator[Finding]:
    """Reason why reductions of a norm stay in float32, for the worst activations."""
    known = [
        (row, errors)
        for row in rows
        if None not in (errors := [_norm_error(row, dtype) for dtype in _FORMATS])
    ]
    if not known:
        return
    worst, errors = max(known, key=lambda pair: pair[1][1] or 0.0)
    half, brain, wide = (error or 0.0 for error in errors)
    yield finding(
        "autocast.norm-reductions",
        "A norm's reductions need float32: the mean square of the actual inputs of the norms"
        f" of {_subject(worst)} is off by at most {percent(brain)} when accumulated in"
        f" bfloat16 and by {percent(half)} in float16, against {percent(wide)} in float32. A sum"
        " grows until the next term is below half of its last digit.",
        worst,
        {"float16": half, "bfloat16": brain, "float32": wide},
        timed=False,
    )


def _norm_error(row: Row, dtype: str) -> float | None:
    return row.record.quantity("norm_error", variant=dtype)


def _formats_table(rows: Sequence[Row]) -> Table:
    dtypes_of_rows = [row.record.required("formats", Formats) for row in rows]
    names = dict.fromkeys(name for dtypes in dtypes_of_rows for name in dtypes)

    def column(row: Row, dtypes: Formats) -> Declared:
        return col(f"{row.case.subject}, {row.case.dtype}", dtypes.get)

    return table(
        "autocast-formats",
        "Dtype of each tensor",
        names,
        [
            col("tensor", lambda name: name),
            *(column(row, dtypes) for row, dtypes in zip(rows, dtypes_of_rows, strict=True)),
            *(
                col(f"{row.case.subject}, {row.case.dtype}, by CUDA's rules", derived.get)
                for row in rows
                if (derived := _cuda_formats(row))
            ),
        ],
        caption="Read from the tensors while a step ran; of equal blocks the first is shown."
        " Autocast has different operator lists for CPU and CUDA: this shows the device here.",
    )


def _reductions_table(rows: Sequence[Row]) -> Table:
    return table(
        "autocast-reductions",
        "A norm's mean square, accumulated in each dtype",
        rows,
        [col("step", _title), *cols(_FORMATS, _norm_error, "percent", hint="largest error")],
        caption="On the actual inputs of the norms of this step, against float64: the reason why a"
        " norm reduces in float32.",
    )


def _operators_table(row: Row) -> Table:
    return table(
        f"autocast-operators-{row.case.subject}-{row.case.dtype}",
        f"Operators by dtype: {_title(row)}",
        [
            (phase, operator)
            for phase in ("forward", "backward")
            for operator in row.record.required(phase, Operators)
        ],
        [
            col("phase", lambda pair: pair[0]),
            col("operator", lambda pair: pair[1].operator),
            col("reads", lambda pair: ", ".join(pair[1].inputs)),
            col("writes", lambda pair: ", ".join(pair[1].output)),
            col("times", lambda pair: pair[1].count, "count"),
        ],
        caption="As the dispatcher sees them; `_to_copy` from one dtype to another is a cast.",
    )
