"""Blocks of the levers study, from its records alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.schema import Quantity, Record
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Curve, Figure, Finding, Table
from stepscope.report.format import bytes_, count, duration, number, rate
from stepscope.report.tables import col, failed_table, table
from stepscope.studies.base import Result
from stepscope.studies.levers.cases import CARD as CARD_CASE
from stepscope.studies.levers.cases import LeverCase
from stepscope.studies.levers.catalog import CARD, LEVERS, Words, words

NO_GAIN = 1.05
"""A ratio below this is no gain."""


class LeverRow:
    """A lever that was measured."""

    def __init__(self, result: Result[LeverCase]) -> None:
        self.record = result.record
        self.lever = result.case.lever

    @property
    def title(self) -> str:
        return LEVERS[self.lever].title

    @property
    def words(self) -> Words:
        return words(self.lever, self.record.environment.device_kind)

    @property
    def unit(self) -> str:
        """Of its rate."""
        return next(f"{one.unit}/s" for one in self.record.quantities if one.name == "work")

    def ms(self, form: str) -> float:
        series = self.record.find("step", variant=form)
        assert series is not None
        return summarize(series.values).median

    @property
    def gain(self) -> float:
        return self.ms("slow") / self.ms("fast")

    def rate(self, form: str) -> float:
        return (self.record.quantity("work") or 0.0) / (self.ms(form) * 1e-3)

    def share(self, form: str) -> float | None:
        """The rate of useful work over the measured ceiling of its kind."""
        moves = self.unit == "B/s"
        limit = self._limit("memory.copy" if moves else f"matmul.{self._format(form)}")
        return None if limit is None else self.rate(form) / limit

    @property
    def expected(self) -> float | None:
        """The gain by arithmetic and traffic at the measured ceilings, whichever takes longer; None
        where the arithmetic is the same and the traffic that of caches."""
        arithmetic = {
            (self._format(form), self.record.quantity("flops", variant=form))
            for form in ("slow", "fast")
        }
        if LEVERS[self.lever].cached and len(arithmetic) == 1:
            return None
        slow, fast = self._ideal_s("slow"), self._ideal_s("fast")
        return None if slow is None or fast is None else slow / fast

    def error(self, form: str) -> float | None:
        return self.record.quantity("error", variant=form)

    def kept(self, form: str) -> float | None:
        return self.record.quantity("kept", variant=form)

    def _ideal_s(self, form: str) -> float | None:
        arithmetic = self._limit(f"matmul.{self._format(form)}")
        memory = self._limit("memory.copy")
        flops, moved = (self.record.quantity(what, variant=form) for what in ("flops", "moved"))
        if arithmetic is None or memory is None or flops is None or moved is None:
            return None
        if LEVERS[self.lever].cached:
            return flops / arithmetic
        return max(flops / arithmetic, moved / memory)

    def _format(self, form: str) -> str:
        return (self.record.attachment("dtypes", dict[str, str]) or {}).get(form, "float32")

    def _limit(self, name: str) -> float | None:
        held = self.record.ceiling(name)
        return None if held is None else held.value


def lever_rows(results: Sequence[Result[LeverCase]]) -> list[LeverRow]:
    """The measured levers in the order of the list."""
    order = list(LEVERS)
    done = [
        LeverRow(result)
        for result in results
        if result.record.status == "ok"
        and result.case.lever in LEVERS
        and result.record.find("step", variant="fast")
    ]
    return sorted(done, key=lambda row: order.index(row.lever))


def levers_blocks(results: Sequence[Result[LeverCase]]) -> tuple[Block, ...]:
    rows = lever_rows(results)
    cards = [
        result.record
        for result in results
        if result.record.status == "ok" and result.case.lever == CARD_CASE
    ]
    shown = levers_table(results)
    return (
        *map(_finding, rows),
        *_balance_findings(cards or [row.record for row in rows]),
        *((shown,) if shown is not None else ()),
        *_figures(rows),
        *((_hardware_table(rows),) if rows else ()),
        *(_card_table(record, index) for index, record in enumerate(cards)),
        *failed_table("levers", [result.record for result in results]),
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
    return Finding(
        code="levers.gain",
        values={
            "lever": row.lever,
            "slow_ms": slow,
            "fast_ms": fast,
            "gain": gain,
            "expected": row.expected,
        },
        records=(row.record.id,),
        text=f"{said}.",
        conclusion=f"{why}.",
        tone="good" if pays else "warn",
    )


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
            code="levers.balance",
            values={"device": name}
            | {form: value / memory.value for form, value in formats.items()},
            records=(record.id,),
            timed=False,
            text=f"On {name} a byte of memory traffic takes as long as that many FLOPs of a matrix"
            f" product: {parts}. Work with less arithmetic for each byte is memory-bound.",
        )


def levers_table(results: Sequence[Result[LeverCase]], name: str = "levers") -> Table | None:
    rows = lever_rows(results)
    if not rows:
        return None
    return table(
        name,
        "Six levers: the slow form and the fast one",
        rows,
        [
            col("lever", lambda r: r.title),
            col("slow", lambda r: r.ms("slow"), unit="ms"),
            col("fast", lambda r: r.ms("fast"), unit="ms"),
            col("gain", lambda r: r.gain, unit="×"),
            col(
                "expected",
                lambda r: r.expected,
                unit="×",
                hint="each form's arithmetic and traffic at the measured ceilings, whichever takes"
                " longer; traffic that a cache serves costs less",
            ),
            col(
                "slow rate",
                lambda r: rate(r.rate("slow"), r.unit),
                hint="useful bytes or FLOPs over the time",
            ),
            col(
                "fast rate",
                lambda r: rate(r.rate("fast"), r.unit),
                hint="the same work over the shorter time",
            ),
            col("slow of ceiling", lambda r: r.share("slow"), "percent"),
            col("fast of ceiling", lambda r: r.share("fast"), "percent"),
            col("slow error", lambda r: r.error("slow"), "number", hint="against float64"),
            col("fast error", lambda r: r.error("fast"), "number", hint="against float64"),
        ],
        caption="Medians of samples taken in turns. Ceilings: copy for bytes, matrix rate of the"
        " form's format for FLOPs (of float64 that of float32, which is twice as high); on a CPU"
        " they are those of all cores, and a form runs on one."
        " Errors are the largest difference as a share of the largest number.",
        details=lambda r: f"slow: {r.words.slow}\nfast: {r.words.fast}\n{r.words.hardware}",
    )


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
    return table(
        "levers-hardware",
        "What the hardware does",
        rows,
        [
            col("lever", lambda r: r.title),
            col("slow form", lambda r: r.words.slow),
            col("fast form", lambda r: r.words.fast),
            col("mechanism", lambda r: r.words.hardware),
            col(
                "in the waterfall",
                lambda r: LEVERS[r.lever].cause,
                hint="the part of a step's time that it shortens",
            ),
            col("in a training step", lambda r: LEVERS[r.lever].example),
        ],
    )


def _card_table(record: Record, index: int) -> Table:
    facts = {one.name: one for one in record.quantities}
    lines = [
        *((name, said, "") for name, said in record.required("card", dict[str, str]).items()),
        *(
            (title, _fact(facts[name]), meaning)
            for name, (title, meaning) in CARD.items()
            if name in facts
        ),
        *(
            (f"measured: {held.name}", rate(held.value, held.unit), held.detail)
            for held in record.ceilings
            if held.source == "measured"
        ),
    ]
    return table(
        "levers-card" + (f"-{index + 1}" if index else ""),
        f"Device card: {record.environment.device_name}",
        lines,
        [
            col("what", lambda line: line[0]),
            col("here", lambda line: line[1]),
            col("meaning", lambda line: line[2]),
        ],
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
