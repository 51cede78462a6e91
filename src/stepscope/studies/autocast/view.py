"""What autocast does to each tensor and operator: findings and tables. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Cell, Column, Finding, Table
from stepscope.report.format import bytes_, count, percent
from stepscope.studies.autocast.dtype_rows import Formats, Operators

_ENDS = ("parameters", "logits", "loss", "gradients")
_FORMATS = ("float16", "bfloat16", "float32")
_CAST = "_to_copy"


def autocast_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    done = [r for r in records if r.status == "ok" and "formats" in r.attachments]
    lost = [record for record in records if record.status != "ok"]
    blocks: list[Block] = []
    for subject in dict.fromkeys(record.config["subject"] for record in done):
        blocks += _findings([record for record in done if record.config["subject"] == subject])
    blocks += _norm_finding(done)
    if done:
        blocks += [_formats_table(done), _reductions_table(done)]
        blocks += [_operators_table(record) for record in done]
    if lost:
        blocks.append(
            Table(
                name="autocast-lost",
                title="Cases without a result",
                columns=(Column(title="case"), Column(title="status"), Column(title="reason")),
                rows=tuple((record.case, record.status, record.reason) for record in lost),
            )
        )
    return tuple(blocks)


def _subject(record: Record) -> str:
    subject = record.config["subject"]
    return "the small net of the course" if subject == "toy" else f"the {subject} model"


def _title(record: Record) -> str:
    return f"{_subject(record)} under {record.config['dtype']} autocast"


def kept_wide(record: Record) -> list[str]:
    """Operators of the forward that read float32 and have more than casting to do."""
    operators = record.required("forward", Operators)
    return sorted(
        {o.operator for o in operators if o.inputs == ("float32",) and o.operator != _CAST}
    )


def _findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Of one subject, its formats of autocast together."""
    under = " and ".join(record.config["dtype"] for record in records)
    subject = _subject(records[0])
    held = [record.required("formats", Formats) for record in records]
    named = {
        name: " / ".join(dict.fromkeys(formats.get(name, "") for formats in held))
        for name in held[0]
    }
    ends = ", ".join(f"{name} {named[name]}" for name in _ENDS if name in named)
    inner = [name for name in named if name not in _ENDS]
    listed = (
        " Its modules give: " + ", ".join(f"{name} {named[name]}" for name in inner) + "."
        if records[0].config["subject"] == "toy"
        else ""
    )
    yield Finding(
        text=f"{subject[:1].upper()}{subject[1:]} under {under} autocast: {ends}.{listed}"
    )
    told = dict.fromkeys(_casts(record) for record in records)
    shares = [percent(share) for record in records if (share := _casts_share(record)) is not None]
    text = f"In one step of {subject} there are {' / '.join(told)} read and written"
    if shares:
        text += f"; alone they take {' / '.join(dict.fromkeys(shares))} of the step's time"
    wide = sorted({name for record in records for name in kept_wide(record)})
    if wide:
        text += f". The forward keeps in float32: {', '.join(wide)}"
    yield Finding(text=text + ".")


def _casts(record: Record) -> str:
    casts, size = record.quantity("casts") or 0, record.quantity("cast_bytes") or 0
    return f"{count(casts)} casts, {bytes_(size)}"


def _casts_share(record: Record) -> float | None:
    step, replayed = record.find("step"), record.find("casts")
    if step is None or replayed is None or not step.values or not replayed.values:
        return None
    return summarize(replayed.values).median / summarize(step.values).median


def _norm_finding(records: Sequence[Record]) -> Iterator[Finding]:
    """Why a norm's reductions stay in float32, on the activations that lose the most."""
    judged = [
        record
        for record in records
        if all(record.quantity("norm_error", variant=form) is not None for form in _FORMATS)
    ]
    if not judged:
        return
    worst = max(judged, key=lambda record: record.quantity("norm_error", variant="bfloat16") or 0)
    half, brain, wide = (worst.quantity("norm_error", variant=form) or 0.0 for form in _FORMATS)
    yield Finding(
        text=f"A norm's reductions need float32: the mean square of what the norms of"
        f" {_subject(worst)} really read is off by {percent(brain)} at most when the sum is kept in"
        f" bfloat16 and by {percent(half)} in float16, against {percent(wide)} in float32. A sum"
        " grows until the next term is below half of its last digit."
    )


def _formats_table(records: Sequence[Record]) -> Table:
    held = [record.required("formats", Formats) for record in records]
    names = list(dict.fromkeys(name for formats in held for name in formats))
    return Table(
        name="autocast-formats",
        title="The format of each tensor",
        columns=(
            Column(title="tensor"),
            *(Column(title=f"{r.config['subject']}, {r.config['dtype']}") for r in records),
        ),
        rows=tuple((name, *(formats.get(name) for formats in held)) for name in names),
        caption="Read off the tensors while a step ran; of several equal blocks the first is shown."
        " Autocast has other lists for a CPU than for CUDA: this is what the device here does.",
    )


def _reductions_table(records: Sequence[Record]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (_title(record), *(record.quantity("norm_error", variant=form) for form in _FORMATS))
        for record in records
    ]
    return Table(
        name="autocast-reductions",
        title="A norm's mean square with the sum kept in each format",
        columns=(
            Column(title="step"),
            *(Column(title=form, kind="percent", hint="largest error") for form in _FORMATS),
        ),
        rows=tuple(rows),
        caption="On the inputs that the norms of this step really had, against float64: why a norm"
        " reduces in float32.",
    )


def _operators_table(record: Record) -> Table:
    def rows(phase: str) -> Iterator[tuple[Cell, ...]]:
        for held in record.required(phase, Operators):
            yield phase, held.operator, _words(held.inputs), _words(held.output), held.count

    return Table(
        name=f"autocast-operators-{record.config['subject']}-{record.config['dtype']}",
        title=f"Operators by format: {_title(record)}",
        columns=(
            Column(title="phase"),
            Column(title="operator"),
            Column(title="reads"),
            Column(title="writes"),
            Column(title="times", kind="count"),
        ),
        rows=(*rows("forward"), *rows("backward")),
        caption="As the dispatcher sees them; `_to_copy` from one format to another is a cast.",
    )


def _words(formats: Sequence[str]) -> str:
    return ", ".join(formats)
