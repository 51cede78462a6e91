"""Findings and tables of a check. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from stepscope.grading.check.cases import AnyCase, CriterionCase, Fault, Outcome, SpeedCase
from stepscope.grading.check.kinds import KINDS, Criterion
from stepscope.records.stats import Ratio, Summary, paired_ratio, summarize
from stepscope.report.blocks import Block, Finding, Value
from stepscope.report.format import duration, number
from stepscope.report.tables import col, cols, interval, table
from stepscope.studies.base import Result, results_of
from stepscope.views.builders import finding, grouped, suffix

_FAILED = {
    "timeout": "hangs",
    "oom": "out-of-memory",
    "error": "crashes",
}
"""Codes of criteria whose process did not finish."""
OWN = "yours"
NAMES = {"yours": OWN, "Stepscope's": "stepscope", "torch's": "torch"}
"""Variants of the series, by their titles."""


class Graded(Result[CriterionCase]):
    """The result of one criterion."""

    @cached_property
    def outcome(self) -> Outcome:
        record = self.record
        if record.status == "skipped":
            return Outcome(notes=(f"not graded: {record.reason}",))
        if record.status != "ok":
            return Outcome(faults=(Fault(code=_FAILED[record.status], text=record.reason),))
        return record.attachment("outcome", Outcome) or Outcome()

    @property
    def criterion(self) -> Criterion:
        kind = KINDS[self.case.kind]
        known = {one.name: one for one in kind.criteria}
        return known.get(self.case.criterion, Criterion(self.case.criterion, self.case.criterion))

    @property
    def fails(self) -> bool:
        """True if a required criterion does not hold."""
        return bool(self.outcome.faults) and not self.criterion.beyond

    @property
    def result(self) -> str:
        """In a word or a code; notes say what was not graded."""
        if self.outcome.faults:
            codes = ", ".join(dict.fromkeys(fault.code for fault in self.outcome.faults))
            return f"warning: {codes}" if self.criterion.beyond else f"fails: {codes}"
        refused = [note for note in self.outcome.notes if note.startswith("not graded")]
        return "not graded" if refused else "refused" if self._refuses else "holds"

    @property
    def _refuses(self) -> bool:
        return any(note.startswith("refuses") for note in self.outcome.notes)


def check_blocks(results: Sequence[Result[AnyCase]]) -> tuple[Block, ...]:
    graded = [Graded(*one) for one in results_of(results, CriterionCase)]
    timed = [Timed(*one) for one in results_of(results, SpeedCase)]
    tables: list[Block] = []
    blocks: list[Block] = []
    for index, rows in enumerate(grouped(graded, lambda row: row.case.subject).values()):
        name = rows[0].case.name
        blocks += _findings(name, rows)
        tables.append(
            table(
                f"check-criteria{suffix(index)}",
                f"{name}: criteria",
                rows,
                [
                    col("criterion", lambda row: row.case.criterion, "code", key=True),
                    col("about", lambda row: row.criterion.title, key=True),
                    col("result", lambda row: row.result, key=True),
                ],
            )
        )
    blocks += [found for row in timed for found in row.findings()]
    blocks += tables
    if done := [row for row in timed if row.record.status == "ok"]:
        blocks.append(
            table(
                "check-speed",
                "Speed",
                done,
                [
                    col("implementation", lambda row: row.case.name),
                    *cols(list(NAMES), lambda row, name: interval(row.summary(name)), unit="ms"),
                    col("input", lambda row: row.record.notes.get("shape", "")),
                ],
                caption="Forward and backward, or a training step: medians with their intervals,"
                " measured interleaved on the same inputs.",
            )
        )
    return tuple(blocks)


def _findings(name: str, rows: Sequence[Graded]) -> Iterator[Finding]:
    """One finding for each code: the first sentence, and the other criteria that show it."""
    found = [(row, fault) for row in rows for fault in row.outcome.faults]
    required = [pair for pair in found if not pair[0].criterion.beyond]
    beyond = [pair for pair in found if pair[0].criterion.beyond]
    for pairs in (required, beyond):
        for code, same in grouped(pairs, lambda pair: pair[1].code).items():
            row, fault = same[0]
            criteria = list(dict.fromkeys(one.case.criterion for one, _ in same))
            also = f" Also in: {', '.join(criteria[1:])}." if criteria[1:] else ""
            # Where everything fails alike, it is not about the first criterion.
            everywhere = len({one.case.criterion for one, _ in same}) == len(rows) > 1
            where, also = ("", "") if everywhere else (f", {criteria[0]}", also)
            more = "Beyond the course: " if pairs is beyond else ""
            yield finding(
                f"check.{code}",
                f"{name}{where}: {more}{fault.text.rstrip('.')}.{also}",
                [one for one, _ in same],
                {
                    "implementation": name,
                    "kind": row.case.kind,
                    "criteria": ", ".join(criteria),
                    "required": pairs is required,
                    **{key: value for key, value in fault.values.items() if _plain(value)},
                },
                tone="warn",
                timed=False,
            )
    if not required:
        holding = [row for row in rows if row.result == "holds"]
        yield finding(
            "check.passed",
            f"{name}: {len(holding)} of {len(rows)} criteria hold, and none fails"
            f"{' that the course requires' if beyond else ''}.",
            rows,
            {"implementation": name, "holding": len(holding), "of": len(rows)},
            tone="good" if holding else "info",
            timed=False,
        )
    noted = [(row, note) for row in rows for note in row.outcome.notes]
    for note, those in grouped(noted, lambda pair: pair[1]).items():
        names = ", ".join(dict.fromkeys(row.case.criterion for row, _ in those))
        yield finding(
            "check.not-graded",
            f"{name}, {names}: {note.rstrip('.')}.",
            [row for row, _ in those],
            {"implementation": name, "criteria": names, "note": note},
            timed=False,
        )


def _plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


class Timed(Result[SpeedCase]):
    """Times of an implementation and of others, interleaved."""

    def times(self, variant: str) -> tuple[float, ...]:
        """Samples in ms; on ranks, of the slowest in each round."""
        series = [one for one in self.record.series if (one.name, one.variant) == ("step", variant)]
        on_device = [one for one in series if one.clock == "device"]
        return tuple(
            max(values) for values in zip(*(one.values for one in on_device or series), strict=True)
        )

    def summary(self, name: str) -> Summary | None:
        values = self.times(NAMES[name])
        return summarize(values) if values else None

    def ratio(self, variant: str) -> Ratio:
        """Time of the implementation over that of a variant."""
        return paired_ratio(self.times(variant), self.times(OWN), level=0.95)

    def findings(self) -> Iterator[Finding]:
        record, name = self.record, self.case.name
        if record.status != "ok":
            why = "" if record.status == "skipped" else f" ({record.status})"
            yield finding(
                "check.not-timed",
                f"{name} was not timed{why}: {record.reason}.",
                record,
                {"implementation": name, "reason": record.reason},
                tone="info" if record.status == "skipped" else "warn",
                timed=False,
            )
            return
        own = summarize(self.times(OWN)).median
        values: dict[str, Value] = {"implementation": name, "ms": own}
        compared = []
        for label, variant in NAMES.items():
            if variant != OWN and (times := self.times(variant)):
                ratio = self.ratio(variant)
                values |= {
                    variant: summarize(times).median,
                    f"{variant}_ratio": ratio.value,
                    f"{variant}_low": ratio.low,
                    f"{variant}_high": ratio.high,
                }
                spread = (
                    f"{number(ratio.value, 3)}× [{number(ratio.low, 3)}, {number(ratio.high, 3)}]"
                )
                compared.append(
                    f"{spread} the time of {label} ({duration(summarize(times).median)})"
                )
        yield finding(
            "check.speed",
            f"{name} takes {duration(own)}{': ' if compared else ''}{' and '.join(compared)}.",
            record,
            values,
        )
        excluded = record.attachment("excluded", dict[str, str]) or {}
        for variant, why in excluded.items():
            title = next((label for label, one in NAMES.items() if one == variant), variant)
            yield finding(
                "check.not-timed",
                f"{title} was not timed: {why}.",
                record,
                {"implementation": variant, "reason": why},
                timed=False,
            )


def outcome(result: Result[AnyCase]) -> str:
    return "".join(Graded(*one).result for one in results_of([result], CriterionCase))


def failing(results: Sequence[Result[AnyCase]]) -> list[str]:
    """Names of the implementations of which a required criterion fails."""
    graded = [Graded(*one) for one in results_of(results, CriterionCase)]
    return list(dict.fromkeys(row.case.name for row in graded if row.fails))
