"""Records of several ranks: the slowest rank's samples, findings, rows by variant. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from stepscope.records.schema import Record
from stepscope.records.stats import Summary, summarize
from stepscope.report.blocks import Finding, Tone, Value
from stepscope.report.tables import Declared, col, interval
from stepscope.studies.base import Result
from stepscope.studies.ranks.cases import RankedCase

R = TypeVar("R", bound=RankedCase)


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

    def finding(
        self,
        what: str,
        text: str,
        values: Mapping[str, Value],
        *,
        conclusion: str = "",
        tone: Tone = "info",
    ) -> Finding:
        """A finding that rests on this record alone."""
        return Finding(
            code=f"{self.record.study}.{what}",
            values={"ranks": self.case.ranks, "backend": self.backend, **values},
            records=(self.record.id,),
            text=f"{self.title}: {text}",
            conclusion=conclusion,
            tone=tone,
        )


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
