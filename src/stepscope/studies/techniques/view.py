"""Report blocks of the techniques study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.analysis.conclusions import NOTHING, conclude
from stepscope.analysis.effects import Effect, paired
from stepscope.records.schema import Quantity, Record
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Figure, Finding, Table, Value
from stepscope.report.format import bytes_, count, duration, number, rate
from stepscope.report.tables import col, failed_table, table
from stepscope.studies.base import Result
from stepscope.studies.techniques.cases import CARD as CARD_CASE
from stepscope.studies.techniques.cases import TechniqueCase
from stepscope.studies.techniques.catalog import CARD, TECHNIQUES, words
from stepscope.views.builders import capitalized, curve, finding, suffix

NO_GAIN = 1.05
"""Smallest speedup that counts as a gain."""


class TechniqueRow:
    """A measured technique with derived values."""

    def __init__(self, result: Result[TechniqueCase]) -> None:
        self.record, case = result
        self.technique = TECHNIQUES[case.technique]
        self.name = case.technique
        self.title = self.technique.title
        self.words = words(case.technique, self.record.environment.device_kind)

    @property
    def unit(self) -> str:
        """Unit of its rate."""
        return next(f"{q.unit}/s" for q in self.record.quantities if q.name == "work")

    def ms(self, form: str) -> float:
        series = self.record.find("step", variant=form)
        assert series is not None
        return summarize(series.values).median

    @property
    def gain(self) -> float:
        return self.ms("slow") / self.ms("fast")

    @property
    def effect(self) -> Effect:
        """Time of the slow variant over that of the fast one, in interleaved samples."""
        slow, fast = (self.record.find("step", variant=form) for form in ("slow", "fast"))
        assert slow is not None
        assert fast is not None
        return paired(fast.values, slow.values)

    def rate(self, form: str) -> float:
        return (self.record.quantity("work") or 0.0) / (self.ms(form) * 1e-3)

    def share(self, form: str) -> float | None:
        """Rate of useful work over the measured ceiling of its kind."""
        moves = self.unit == "B/s"
        limit = self._limit("memory.copy" if moves else f"matmul.{self._dtype(form)}")
        return None if limit is None else self.rate(form) / limit

    @property
    def expected(self) -> float | None:
        """Predicted speedup from FLOPs and memory traffic at the measured ceilings (roofline); None
        where the FLOPs are the same and the traffic is served by caches."""
        arithmetic = {
            (self._dtype(form), self.record.quantity("flops", variant=form))
            for form in ("slow", "fast")
        }
        if self.technique.cached and len(arithmetic) == 1:
            return None
        slow, fast = self._ideal_s("slow"), self._ideal_s("fast")
        return None if slow is None or fast is None else slow / fast

    def error(self, form: str) -> float | None:
        return self.record.quantity("error", variant=form)

    def saved_bytes(self, form: str) -> float | None:
        return self.record.quantity("kept", variant=form)

    def _ideal_s(self, form: str) -> float | None:
        arithmetic = self._limit(f"matmul.{self._dtype(form)}")
        memory = self._limit("memory.copy")
        flops, moved = (self.record.quantity(what, variant=form) for what in ("flops", "moved"))
        if arithmetic is None or memory is None or flops is None or moved is None:
            return None
        if self.technique.cached:
            return flops / arithmetic
        return max(flops / arithmetic, moved / memory)

    def _dtype(self, form: str) -> str:
        return (self.record.attachment("dtypes", dict[str, str]) or {}).get(form, "float32")

    def _limit(self, name: str) -> float | None:
        ceiling = self.record.ceiling(name)
        return None if ceiling is None else ceiling.value


def technique_rows(results: Sequence[Result[TechniqueCase]]) -> list[TechniqueRow]:
    """The measured techniques in the order of `TECHNIQUES`."""
    order = list(TECHNIQUES)
    done = [
        TechniqueRow(result)
        for result in results
        if result.record.status == "ok"
        and result.case.technique in TECHNIQUES
        and result.record.find("step", variant="fast")
    ]
    return sorted(done, key=lambda row: order.index(row.name))


def view(results: Sequence[Result[TechniqueCase]]) -> tuple[Block, ...]:
    rows = technique_rows(results)
    cards = [
        result.record
        for result in results
        if result.record.status == "ok" and result.case.technique == CARD_CASE
    ]
    shown = techniques_table(results)
    return (
        *map(_finding, rows),
        *_balance_findings(cards or [row.record for row in rows]),
        *filter(None, (shown,)),
        *((_figure(rows), _hardware_table(rows)) if rows else ()),
        *(_card_table(record, index) for index, record in enumerate(cards)),
        *failed_table("techniques", [result.record for result in results]),
    )


def _finding(row: TechniqueRow) -> Finding:
    slow, fast, gain = row.ms("slow"), row.ms("fast"), row.gain
    times = f"{duration(slow)} vs {duration(fast)}"
    effect = row.effect
    faster = effect.against(NO_GAIN).above
    if faster:
        text = f"{row.title}: {number(gain, 3)}× faster ({times})"
    elif effect.against(1 / NO_GAIN).below:
        text = f"{row.title}: {number(1 / gain, 3)}× slower ({times})"
    else:
        text = f"{row.title}: no difference shown ({times})"
    if row.expected is not None:
        text += f"; {number(row.expected, 3)}× predicted from FLOPs and memory traffic"
    much, little = row.saved_bytes("slow"), row.saved_bytes("fast")
    if much is not None and little is not None:
        text += f"; {bytes_(little)} instead of {bytes_(much)} saved for backward"
    values: dict[str, Value] = {
        "technique": row.name,
        "slow_ms": slow,
        "fast_ms": fast,
        "gain": gain,
    }
    return finding(
        "techniques.gain",
        f"{text}.",
        row,
        values | {"expected": row.expected},
        conclusion=conclude(f"{capitalized(row.words.hardware)}.", effect.against(NO_GAIN))
        if faster
        else NOTHING,
        tone="good" if faster else "warn" if much is None else "info",
    )


def _balance_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Report the ridge point of each device: FLOPs per byte of memory traffic."""
    seen = set()
    for record in records:
        name = record.environment.device_name
        memory = record.ceiling("memory.copy")
        rates = {
            dtype: ceiling.value
            for dtype in ("float32", "tf32", "float16", "bfloat16")
            if (ceiling := record.ceiling(f"matmul.{dtype}")) is not None
        }
        # Leave out dtypes that the device emulates, which are slower than float32.
        rates = {d: v for d, v in rates.items() if v >= rates.get("float32", 0.0)}
        if name in seen or memory is None or not rates:
            continue
        seen.add(name)
        ridges = {dtype: value / memory.value for dtype, value in rates.items()}
        parts = ", ".join(f"{number(ridge, 3)} in {dtype}" for dtype, ridge in ridges.items())
        yield finding(
            "techniques.balance",
            f"Ridge point of {name} in FLOPs per byte of memory traffic: {parts}. Kernels with a"
            " lower arithmetic intensity are memory-bound.",
            record,
            {"device": name, **ridges},
            timed=False,
        )


def techniques_table(
    results: Sequence[Result[TechniqueCase]], name: str = "techniques"
) -> Table | None:
    rows = technique_rows(results)
    if not rows:
        return None
    return table(
        name,
        "Six techniques: slow and fast variant",
        rows,
        [
            col("technique", lambda r: r.title),
            col("slow", lambda r: r.ms("slow"), unit="ms"),
            col("fast", lambda r: r.ms("fast"), unit="ms"),
            col("gain", lambda r: r.gain, unit="×"),
            col(
                "expected",
                lambda r: r.expected,
                unit="×",
                hint="roofline prediction: the longer of FLOPs and memory traffic at the measured"
                " ceilings; traffic served by a cache costs less",
            ),
            col(
                "slow rate",
                lambda r: rate(r.rate("slow"), r.unit),
                hint="useful bytes or FLOPs over the time",
            ),
            col(
                "fast rate",
                lambda r: rate(r.rate("fast"), r.unit),
                hint="the same work over the time of the fast variant",
            ),
            col("slow of ceiling", lambda r: r.share("slow"), "percent"),
            col("fast of ceiling", lambda r: r.share("fast"), "percent"),
            col("slow error", lambda r: r.error("slow"), "number", hint="against float64"),
            col("fast error", lambda r: r.error("fast"), "number", hint="against float64"),
        ],
        caption="Medians of interleaved samples. Ceilings: copy bandwidth for bytes, matmul rate of"
        " the variant's dtype for FLOPs (float64 uses that of float32, which is twice as high). On"
        " a CPU, ceilings are measured on all cores, a variant runs on one core."
        " Errors are the largest difference relative to the largest value.",
        details=lambda r: f"slow: {r.words.slow}\nfast: {r.words.fast}\n{r.words.hardware}",
    )


def _figure(rows: Sequence[TechniqueRow]) -> Figure:
    expected = [(row.title, row.expected) for row in rows if row.expected is not None]
    return Figure(
        name="techniques-gains",
        title="Gain of each technique",
        kind="bars",
        curves=(
            curve("measured", ((row.title, row.gain) for row in rows)),
            *([curve("expected", expected)] if expected else []),
        ),
        x_label="technique",
        y_label="speedup",
    )


def _hardware_table(rows: Sequence[TechniqueRow]) -> Table:
    return table(
        "techniques-hardware",
        "Hardware mechanism of each technique",
        rows,
        [
            col("technique", lambda r: r.title),
            col("slow variant", lambda r: r.words.slow),
            col("fast variant", lambda r: r.words.fast),
            col("mechanism", lambda r: r.words.hardware),
            col(
                "in the waterfall",
                lambda r: r.technique.cause,
                hint="the part of a step's time that the technique shortens",
            ),
            col("in a training step", lambda r: r.technique.example),
        ],
    )


def _card_table(record: Record, index: int) -> Table:
    quantities = {quantity.name: quantity for quantity in record.quantities}
    lines = [
        *((name, text, "") for name, text in record.required("card", dict[str, str]).items()),
        *(
            (title, _formatted(quantities[name]), meaning)
            for name, (title, meaning) in CARD.items()
            if name in quantities
        ),
        *(
            (f"measured: {ceiling.name}", rate(ceiling.value, ceiling.unit), ceiling.detail)
            for ceiling in record.ceilings
            if ceiling.source == "measured"
        ),
    ]
    return table(
        f"techniques-card{suffix(index)}",
        f"Device card: {record.environment.device_name}",
        lines,
        [
            col("property", lambda line: line[0]),
            col("value", lambda line: line[1]),
            col("meaning", lambda line: line[2]),
        ],
        caption="As reported by the driver and the system; missing properties are left out.",
    )


def _formatted(quantity: Quantity) -> str:
    match quantity.unit:
        case "B":
            return bytes_(quantity.value)
        case "1":
            return count(quantity.value)
        case "bit" | "W":
            return f"{count(quantity.value)} {quantity.unit}"
        case unit:
            return rate(quantity.value, unit)
