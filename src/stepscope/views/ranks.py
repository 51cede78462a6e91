"""Records of several ranks: the slowest rank's samples, findings, rows by variant. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from stepscope.records.schema import Record
from stepscope.records.stats import Summary, summarize
from stepscope.report.blocks import Finding, Value
from stepscope.report.format import number
from stepscope.report.tables import Declared, col, interval
from stepscope.training.case import Result
from stepscope.training.ranks.cases import CHECK_STEPS, RankedCase
from stepscope.views.builders import finding

R = TypeVar("R", bound=RankedCase)
CLOSE = 0.01
"""Accepted difference as a fraction of the largest change of a parameter in these steps."""


class RankedResult(Result[R]):
    """A record of several ranks with its case; series and quantities are by `variant`."""

    @property
    def backend(self) -> str:
        """The backend that was used; a case may leave the choice open."""
        return self.record.notes.get("backend", self.case.backend)

    @property
    def label(self) -> str:
        ranks = self.case.ranks
        return f"{'1 rank' if ranks == 1 else f'{ranks:,} ranks'}, {self.backend}"

    @property
    def title(self) -> str:
        return self.label

    def samples(self, name: str, variant: str = "", size: int = 0) -> list[float]:
        """The slowest rank's sample of each round; empty if the series was not measured."""
        ranks = [
            series.values
            for series in self.record.series
            if (series.name, series.variant, series.size) == (name, variant, size)
        ]
        return [max(samples) for samples in zip(*ranks, strict=True)]

    def summary(self, name: str, variant: str = "", size: int = 0) -> Summary | None:
        samples = self.samples(name, variant, size)
        return summarize(samples) if samples else None

    def median(self, name: str, variant: str) -> float | None:
        summary = self.summary(name, variant)
        return summary.median if summary else None

    def most(self, name: str, variant: str, phase: str = "") -> float | None:
        """A quantity on the rank with the most."""
        return max(self.by_rank(name, variant, phase), default=None)

    def by_rank(self, name: str, variant: str, phase: str = "") -> list[float]:
        """A quantity on each rank; empty if it was not measured."""
        values = (
            self.record.quantity(name, variant=variant, phase=phase, rank=rank)
            for rank in range(self.case.ranks)
        )
        return [value for value in values if value is not None]

    def correctness(self, names: Iterable[str]) -> Iterator[Finding]:
        """Whether the parameters after a few steps are those of one process up to rounding."""
        record = self.record
        change, rounding = record.quantity("change"), record.quantity("rounding")
        off = {name: d for name in names if (d := self.most("difference", name)) is not None}
        if change is None or rounding is None or not off:
            return
        accepted = CLOSE * change + 2 * rounding
        wrong = [name for name, difference in off.items() if not difference <= accepted]
        worst = max(off, key=lambda name: off[name])
        verdict = f": the parameters with {', '.join(wrong)} are wrong." if wrong else "."
        extent = f"differ by at most {number(off[worst], 2)} ({worst}) from"
        yield self.finding(
            "correct",
            f"after {CHECK_STEPS} steps the parameters {extent if off[worst] else 'are exactly'}"
            " those of one process on the full batch, which changed by up to"
            f" {number(change, 2)}{verdict}",
            {
                "difference": off[worst],
                "strategy": worst,
                "change": change,
                "accepted": accepted,
                "wrong": ", ".join(wrong),
            },
            tone="warn" if wrong else "good",
            timed=False,
        )

    def finding(self, what: str, text: str, values: Mapping[str, Value], **more: Any) -> Finding:
        """A finding that rests on this record alone."""
        values = {"ranks": self.case.ranks, "backend": self.backend, **values}
        code = f"{self.record.study}.{what}"
        return finding(code, f"{self.title}: {text}", self.record, values, **more)


class VariantRow(NamedTuple):
    """A part of a record, such as a strategy; a failed record has a single row without a part."""

    of: Any
    variant: Any

    @property
    def record(self) -> Record:
        record: Record = self.of.record
        return record


def variant_rows(
    results: Sequence[RankedResult[Any]], variants: Callable[[Any], Iterable[Any]]
) -> list[VariantRow]:
    return [
        VariantRow(result, variant)
        for result in results
        for variant in (variants(result) if result.record.status == "ok" else [None])
    ]


def step_column() -> Declared:
    """Column of the step time, for rows by variant."""
    return col(
        "step",
        lambda r: interval(r.of.summary("step", r.variant)),
        unit="ms",
        hint="median with its 95 % interval",
    )


def difference_column() -> Declared:
    """Column of the difference from one process, for rows by variant."""
    return col(
        "difference",
        lambda r: r.of.most("difference", r.variant),
        "number",
        hint=f"largest difference of a parameter from one process after {CHECK_STEPS} steps",
    )
