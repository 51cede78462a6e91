"""Records of observed programs with their attachments decoded."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from functools import cached_property

import msgspec

from stepscope.analysis.effects import level
from stepscope.analysis.limits import median_ms
from stepscope.analysis.lines.facts import ATTACHMENT as LINES
from stepscope.analysis.lines.facts import Lines
from stepscope.analysis.trace.collectives import behind_next_ms, lateness_ms
from stepscope.analysis.trace.summary import Summary
from stepscope.records.plans import ATTACHMENT as PLANS
from stepscope.records.plans import Planned
from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.report.blocks import Finding
from stepscope.views.builders import grouped
from stepscope.views.memory import Account
from stepscope.views.program.cases import RecordedStep
from stepscope.views.program.setting import Setting, setting_of
from stepscope.views.trace.findings import host_idle

_MIN_SHARE = 0.03
"""Lateness, as a share of the step, below which ranks count as equally fast."""
_CLEARLY = 2.0
"""A rank is the slowest if it is at least this many times as late as the next one."""


class ProgramRecord:
    """Record of one process of an observed program, or of the step of a user's model."""

    def __init__(self, record: Record) -> None:
        self.record = record

    @cached_property
    def case(self) -> RecordedStep:
        return msgspec.convert(self.record.config, RecordedStep)

    @property
    def name(self) -> str:
        return self.case.program

    @property
    def command(self) -> str:
        """The program in the words of a command line; empty if none runs it, as in a notebook."""
        case = self.record.config
        if case.get("model"):
            return f"--model {shlex.quote(str(case['model']))}"
        if (command := self.record.notes.get("command")) is not None:
            return command
        arguments = [str(word) for word in case.get("arguments", ())]
        return shlex.join([str(case.get("script", "train.py")), *arguments])

    @property
    def rank(self) -> int:
        return self.case.rank

    @cached_property
    def summary(self) -> Summary | None:
        return self.record.attachment("profile", Summary)

    @cached_property
    def lines(self) -> Lines | None:
        """The lines of the program's own code."""
        return self.record.attachment(LINES, Lines)

    @cached_property
    def setting(self) -> Setting | None:
        return setting_of(self.record)

    @cached_property
    def account(self) -> Account | None:
        return Account(self.record, self.name) if "ledger" in self.record.attachments else None

    @cached_property
    def plans(self) -> Planned:
        """Plans of the memory of the step, and of larger ones."""
        return self.record.attachment(PLANS, Planned) or ()

    @property
    def step_ms(self) -> float | None:
        return median_ms(self.record, "step")

    @property
    def missing(self) -> str:
        """Reason why the time or the trace of a step is missing; empty if both exist."""
        if self.summary is not None and self.step_ms is not None:
            return ""
        return self._reason("recording_failed", "trace_missing", "cut_short") or (
            self.record.reason or "it has no trace"
        )

    @property
    def incomplete(self) -> str:
        """Reason why not all steps were recorded; empty if they were."""
        return self._reason("recording_failed", "cut_short") or self.missing

    def _reason(self, *notes: str) -> str:
        """The first of these notes that the record has; empty without any."""
        return next(filter(None, map(self.record.notes.get, notes)), "")

    @property
    def distributed(self) -> bool:
        """True if the program ran under torchrun, or in a process group of its own."""
        return self.case.ranks > 1 or (self.setting is not None and self.setting.distributed)

    @property
    def issue_ms(self) -> dict[str, float]:
        """Time in which the CPU issues each phase to an idle GPU; empty if not measured."""
        return {
            series.phase: summarize(series.values).median
            for series in self.record.series
            if series.name == "issue" and series.phase
        }

    @property
    def loading_ms(self) -> float | None:
        """Time in a DataLoader per step, without the profiler: the mean with workers, which deliver
        batches in bursts."""
        series = self.record.find("loading")
        if series is None or not series.values:
            return None
        spread = summarize(series.values)
        return spread.mean if self.loader_workers else spread.median

    @property
    def loader_workers(self) -> int:
        return self.setting.loader_workers if self.setting is not None else 0

    @property
    def waited_less_ms(self) -> float:
        """Time by which the traced steps waited less for their DataLoader than the timed ones:
        while tracing is prepared, its workers load ahead."""
        if self.summary is None or self.loading_ms is None or not self.loader_workers:
            return 0.0
        return max(0.0, self.loading_ms - self.summary.data_ms)

    @property
    def evaluating_ms(self) -> float:
        """Time by which timed steps that also ran the model without gradients were longer than the
        others, all of them together; they are not part of the step time."""
        longer, step = self.record.find("evaluating"), self.record.find("step", "host")
        if longer is None or step is None or not step.values:
            return 0.0
        usual = summarize(step.values).median
        return sum(max(0.0, ms - usual) for ms in longer.values)

    @property
    def micro_batches(self) -> int:
        """Forward passes per step: more than one with gradient accumulation."""
        return round(self.record.quantity("forwards") or 0)

    @property
    def host_idle(self) -> float | None:
        """Share of the step in which the GPU waits for the CPU; None without a GPU."""
        if self.summary is None or not self.summary.on_device:
            return None
        return host_idle(self.summary, self.step_ms)

    @property
    def communication_ms(self) -> float | None:
        """Time of all collectives in a step, including overlapped ones."""
        if self.summary is None:
            return None
        return sum(row.ms for row in self.summary.kernels if row.kind == "communication")

    @cached_property
    def collectives(self) -> tuple[tuple[int, ...], ...] | None:
        """Start time of each collective of each traced step."""
        return self.record.attachment("collectives", tuple[tuple[int, ...], ...])

    @property
    def traced_validations(self) -> list[int]:
        """Indices of traced steps that, unlike the others, also ran the model without gradients."""
        return self.record.attachment("traced_validations", list[int]) or []

    @property
    def traced_longer(self) -> list[float]:
        """Times in ms of traced steps that took far longer than the others."""
        return self.record.attachment("traced_longer", list[float]) or []


def resting_on(watched: ProgramRecord, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Add the record to findings that name none."""
    ids = (watched.record.id,)
    return tuple(
        finding if finding.records else msgspec.structs.replace(finding, records=ids)
        for finding in findings
    )


def programs(records: Sequence[Record]) -> list[list[ProgramRecord]]:
    """Group records by program; ranks in order."""
    groups = grouped(map(ProgramRecord, records), lambda one: (one.record.run, one.name))
    return [sorted(ranks, key=lambda watched: watched.rank) for ranks in groups.values()]


def lateness(ranks: Sequence[ProgramRecord]) -> dict[int, float]:
    """Mean lateness of each rank at collectives in ms, relative to the first rank to arrive."""
    return lateness_ms(starts(ranks))


def wait_matters(ranks: Sequence[ProgramRecord]) -> bool:
    """True if ranks wait for each other for a significant share of the step."""
    late, step = lateness(ranks), ranks[0].summary
    return bool(late) and step is not None and max(late.values()) >= _MIN_SHARE * step.wall_ms


def slowest(ranks: Sequence[ProgramRecord]) -> ProgramRecord | None:
    """The rank that the others wait for; None if waits are short or for several ranks."""
    if not wait_matters(ranks):
        return None
    late = lateness(ranks)
    *_, next_to_last, most = sorted(late.values())
    last = max(ranks, key=lambda watched: late.get(watched.rank, 0.0))
    behind = behind_next_ms(starts(ranks), last.rank)
    # The wait for it has to exceed the variation between collectives.
    is_later = bool(behind) and level(summarize(behind)).above
    return last if is_later and most >= _CLEARLY * next_to_last else None


def starts(ranks: Sequence[ProgramRecord]) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Start times of the collectives of each rank, of those that were traced."""
    return {rank.rank: times for rank in ranks if (times := rank.collectives) is not None}
