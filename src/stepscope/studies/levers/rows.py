"""One lever's record as numbers: times, what they are of the limit, what was expected."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.studies.levers.catalog import LEVERS, Words, words

NO_GAIN = 1.05
"""A ratio below this is no gain."""


class LeverRow:
    """A lever that was measured."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.lever: str = record.config["lever"]

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


def lever_rows(records: Sequence[Record]) -> list[LeverRow]:
    """The measured levers in the order of the list."""
    place = {name: number for number, name in enumerate(LEVERS)}
    done = [
        LeverRow(record)
        for record in records
        if record.status == "ok"
        and record.config.get("lever") in LEVERS
        and record.find("step", variant="fast")
    ]
    return sorted(done, key=lambda row: place[row.lever])
