"""Blocks of the levers study, from its records alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.schema import Quantity, Record
from stepscope.report.blocks import Block, Cell, Column, Curve, Figure, Finding, Table
from stepscope.report.format import bytes_, count, duration, number, rate
from stepscope.studies.levers.catalog import CARD, LEVERS
from stepscope.studies.levers.rows import NO_GAIN, LeverRow, lever_rows


def levers_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    rows = lever_rows(records)
    cards = [r for r in records if r.status == "ok" and r.config.get("lever") == "card"]
    lost = [record for record in records if record.status != "ok"]
    table = levers_table(records)
    return (
        *(_finding(row) for row in rows),
        *(_balance_findings(cards or [row.record for row in rows])),
        *((table,) if table is not None else ()),
        *_figures(rows),
        *((_hardware_table(rows),) if rows else ()),
        *(_card_table(record, number) for number, record in enumerate(cards)),
        *((_lost_table(lost),) if lost else ()),
    )


def _finding(row: LeverRow) -> Finding:
    slow, fast = row.ms("slow"), row.ms("fast")
    words = row.words
    gain = row.gain
    times = f"{duration(slow)} against {duration(fast)}"
    if gain >= NO_GAIN:
        said = f"{row.title}: {number(gain, 3)}× faster ({times})"
    elif gain > 1 / NO_GAIN:
        said = f"{row.title}: no difference here ({times})"
    else:
        said = f"{row.title}: {number(1 / gain, 3)}× slower here ({times})"
    if row.expected is not None:
        said += f"; {number(row.expected, 3)}× by arithmetic and traffic"
    kept = row.kept("slow"), row.kept("fast")
    if kept[0] is not None and kept[1] is not None:
        said += f"; {bytes_(kept[1])} instead of {bytes_(kept[0])} kept for the backward"
    pays = gain >= NO_GAIN or kept[0] is not None
    why = words.hardware[:1].upper() + words.hardware[1:]
    return Finding(text=f"{said}. {why}.", tone="good" if pays else "warn")


def _balance_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """How much arithmetic a byte must bring, on each device that is shown."""
    seen = set()
    for record in records:
        name = record.environment.device_name
        memory = record.ceiling("memory.copy")
        formats = {
            form: held.value
            for form in ("float32", "tf32", "float16", "bfloat16")
            if (held := record.ceiling(f"matmul.{form}")) is not None
        }
        # A format that the device emulates says nothing about it.
        formats = {f: v for f, v in formats.items() if v >= formats.get("float32", 0.0)}
        if name in seen or memory is None or not formats:
            continue
        seen.add(name)
        parts = ", ".join(
            f"{number(value / memory.value, 3)} in {form}" for form, value in formats.items()
        )
        yield Finding(
            text=f"On {name} a byte of memory traffic takes as long as that many FLOPs of a matrix"
            f" product: {parts}. Work with less arithmetic for each byte is memory-bound."
        )


def levers_table(records: Sequence[Record], name: str = "levers") -> Table | None:
    rows = lever_rows(records)
    if not rows:
        return None

    def cells(row: LeverRow) -> tuple[Cell, ...]:
        return (
            row.title, row.ms("slow"), row.ms("fast"), row.gain, row.expected,
            rate(row.rate("slow"), row.unit), rate(row.rate("fast"), row.unit),
            row.share("slow"), row.share("fast"), row.error("slow"), row.error("fast"),
        )  # fmt: skip

    return Table(
        name=name,
        title="Six levers: the slow form and the fast one",
        columns=(
            Column(title="lever"),
            Column(title="slow", kind="number", unit="ms"),
            Column(title="fast", kind="number", unit="ms"),
            Column(title="gain", kind="number", unit="×"),
            Column(
                title="expected", kind="number", unit="×",
                hint="each form's arithmetic and traffic at the measured ceilings, whichever takes"
                " longer; traffic that a cache serves costs less",
            ),
            Column(title="slow rate", hint="useful bytes or FLOPs over the time"),
            Column(title="fast rate", hint="the same work over the shorter time"),
            Column(title="slow of ceiling", kind="percent"),
            Column(title="fast of ceiling", kind="percent"),
            Column(title="slow error", kind="number", hint="against float64"),
            Column(title="fast error", kind="number", hint="against float64"),
        ),
        rows=tuple(cells(row) for row in rows),
        caption="Medians of samples taken in turns. Ceilings: copy for bytes, matrix rate of the"
        " form's format for FLOPs (of float64 that of float32, which is twice as high); on a CPU"
        " they are those of all cores, and a form runs on one."
        " Errors are the largest difference as a share of the largest number.",
        details=tuple(
            f"slow: {row.words.slow}\nfast: {row.words.fast}\n{row.words.hardware}" for row in rows
        ),
    )  # fmt: skip


def _figures(rows: Sequence[LeverRow]) -> Iterator[Figure]:
    if not rows:
        return
    known = [row for row in rows if row.expected is not None]
    curves = [
        Curve(
            label="measured",
            x=tuple(row.title for row in rows),
            y=tuple(row.gain for row in rows),
        )
    ]
    if known:
        curves.append(
            Curve(
                label="expected",
                x=tuple(row.title for row in known),
                y=tuple(row.expected or 0.0 for row in known),
            )
        )
    yield Figure(
        name="levers-gains",
        title="What each lever gains",
        kind="bars",
        curves=tuple(curves),
        x_label="lever",
        y_label="times as fast",
    )


def _hardware_table(rows: Sequence[LeverRow]) -> Table:
    return Table(
        name="levers-hardware",
        title="What the hardware does",
        columns=(
            Column(title="lever"),
            Column(title="slow form"),
            Column(title="fast form"),
            Column(title="mechanism"),
            Column(title="in the waterfall", hint="the part of a step's time that it shortens"),
            Column(title="in a training step"),
        ),
        rows=tuple(
            (
                row.title, row.words.slow, row.words.fast, row.words.hardware,
                LEVERS[row.lever].cause, LEVERS[row.lever].example,
            )
            for row in rows
        ),
    )  # fmt: skip


def _card_table(record: Record, place: int) -> Table:
    told: list[tuple[Cell, ...]] = [
        (name, said, "") for name, said in (record.attachment("card", dict[str, str]) or {}).items()
    ]
    facts = {one.name: one for one in record.quantities}
    told += [
        (title, _fact(facts[name]), meaning)
        for name, (title, meaning) in CARD.items()
        if name in facts
    ]
    told += [
        (f"measured: {held.name}", rate(held.value, held.unit), held.detail)
        for held in record.ceilings
        if held.source == "measured"
    ]
    return Table(
        name="levers-card" + (f"-{place + 1}" if place else ""),
        title=f"Device card: {record.environment.device_name}",
        columns=(Column(title="what"), Column(title="here"), Column(title="meaning")),
        rows=tuple(told),
        caption="As driver and system tell it; what they do not tell is left out.",
    )


def _fact(held: Quantity) -> str:
    match held.unit:
        case "B":
            return bytes_(held.value)
        case "1":
            return count(held.value)
        case "bit" | "W":
            return f"{count(held.value)} {held.unit}"
        case unit:
            return rate(held.value, unit)


def _lost_table(lost: Sequence[Record]) -> Table:
    return Table(
        name="levers-lost",
        title="Cases without a result",
        columns=(Column(title="case"), Column(title="status"), Column(title="reason")),
        rows=tuple((record.case, record.status, record.reason) for record in lost),
    )
