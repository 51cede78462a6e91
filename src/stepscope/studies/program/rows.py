"""Records of watched programs with their parts decoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import msgspec

from stepscope.analysis.limits import median_ms
from stepscope.analysis.trace.collectives import lateness_ms, times_last
from stepscope.analysis.trace.summary import Summary
from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.report.blocks import Finding
from stepscope.studies.memory.rows import Account
from stepscope.studies.program.cases import RecordedStep
from stepscope.studies.program.setting import Setting, setting_of
from stepscope.studies.trace.findings import host_idle

_WORTH = 0.03
"""Ranks that come to their collectives within this share of the step are alike."""
_CLEARLY = 2.0
"""A rank is the slowest if it is this many times as late as the next one."""


class Watched:
    """One process of a program that was watched, or the step of a user's model."""

    def __init__(self, record: Record) -> None:
        self.record = record

    @cached_property
    def case(self) -> RecordedStep:
        return msgspec.convert(self.record.config, RecordedStep)

    @property
    def name(self) -> str:
        return self.case.program

    @property
    def rank(self) -> int:
        return self.case.rank

    @cached_property
    def summary(self) -> Summary | None:
        return self.record.attachment("profile", Summary)

    @cached_property
    def setting(self) -> Setting | None:
        return setting_of(self.record)

    @cached_property
    def account(self) -> Account | None:
        return _Account(self.record, self.name) if "ledger" in self.record.attachments else None

    @property
    def step_ms(self) -> float | None:
        return median_ms(self.record, "step")

    @property
    def missing(self) -> str:
        """Why there is no time or no trace of a step; empty where there are both."""
        if self.summary is not None and self.step_ms is not None:
            return ""
        notes = self.record.notes
        whys = (
            notes.get("recording_failed"), notes.get("trace_missing"), notes.get("cut_short"),
            self.record.reason,
        )  # fmt: skip
        return next(filter(None, whys), "it has no trace")

    @property
    def not_whole(self) -> str:
        """Why not all steps were recorded; empty where they were."""
        whys = (self.record.notes.get(note) for note in ("recording_failed", "cut_short"))
        return next(filter(None, whys), self.missing)

    @property
    def issue_ms(self) -> dict[str, float]:
        """By phase, what the host takes to issue it to an idle device; empty where that was not
        timed."""
        return {
            series.phase: summarize(series.values).median
            for series in self.record.series
            if series.name == "issue" and series.phase
        }

    @property
    def loading_ms(self) -> float | None:
        """What a step without the profiler spends in a DataLoader."""
        return median_ms(self.record, "loading")

    @property
    def micro_batches(self) -> int:
        """Forwards of the model in a step: more than one where gradients are accumulated."""
        return round(self.record.quantity("forwards") or 0)

    @property
    def host_idle(self) -> float | None:
        """None on a CPU, where the host is the device."""
        if self.summary is None or not self.summary.on_device:
            return None
        return host_idle(self.summary, self.step_ms)

    @property
    def communication_ms(self) -> float | None:
        """Time of all collectives in a step, also where other work hides them."""
        if self.summary is None:
            return None
        return sum(row.ms for row in self.summary.kernels if row.kind == "communication")

    @cached_property
    def collectives(self) -> tuple[tuple[int, ...], ...] | None:
        """When each collective of each traced step began."""
        return self.record.attachment("collectives", tuple[tuple[int, ...], ...])

    @property
    def traced_validations(self) -> list[int]:
        """Places of traced steps that also ran the model without gradients, where others did
        not."""
        return self.record.attachment("traced_validations", list[int]) or []

    @property
    def traced_longer(self) -> list[float]:
        """Milliseconds of traced steps that took far longer than the others."""
        return self.record.attachment("traced_longer", list[float]) or []


def resting_on(one: Watched, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings with the record that they are drawn from, where they name none."""
    ids = (one.record.id,)
    return tuple(
        found if found.records else msgspec.structs.replace(found, records=ids)
        for found in findings
    )


class _Account(Account):
    """Shown under the name of its program."""

    def __init__(self, record: Record, name: str) -> None:
        super().__init__(record)
        self._name = name

    @property
    def name(self) -> str:
        return self._name


def programs(records: Sequence[Record]) -> list[list[Watched]]:
    """The ranks of each program that ran, the first rank first."""
    found: dict[tuple[str, str], list[Watched]] = {}
    for record in records:
        watched = Watched(record)
        found.setdefault((record.run, watched.name), []).append(watched)
    return [sorted(ranks, key=lambda one: one.rank) for ranks in found.values()]


def lateness(ranks: Sequence[Watched]) -> dict[int, float]:
    """Milliseconds by rank after the first that came to a collective, in the mean."""
    return lateness_ms(_starts(ranks))


def last_to_come(ranks: Sequence[Watched]) -> dict[int, int]:
    """By rank, how many collectives it was the last to come to."""
    return times_last(_starts(ranks))


def wait_worth(ranks: Sequence[Watched]) -> bool:
    """Whether ranks wait for one another for long enough to speak of."""
    late, step = lateness(ranks), ranks[0].summary
    return bool(late) and step is not None and max(late.values()) >= _WORTH * step.wall_ms


def slowest(ranks: Sequence[Watched]) -> Watched | None:
    """The rank that the others wait for; None where nobody waits much, or not for one alone."""
    if not wait_worth(ranks):
        return None
    late = lateness(ranks)
    *_, next_to_last, most = sorted(late.values())
    last = max(ranks, key=lambda one: late.get(one.rank, 0.0))
    return last if most >= _CLEARLY * next_to_last else None


def _starts(ranks: Sequence[Watched]) -> dict[int, tuple[tuple[int, ...], ...]]:
    return {one.rank: held for one in ranks if (held := one.collectives) is not None}
