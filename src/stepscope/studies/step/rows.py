"""Ladders: results of the step study, grouped for its views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stepscope.analysis.limits import HostShare, host_bound, step_ms
from stepscope.records.schema import Record
from stepscope.records.stats import Summary
from stepscope.studies.base import Result, results_of
from stepscope.studies.step.cases import LadderCase, StepCase
from stepscope.studies.step.ladder import RUNGS, START
from stepscope.views.builders import grouped

_ORDER = {name: index for index, name in enumerate((START, *RUNGS))}


class Rung(NamedTuple):
    """A measured or failed row of the ladder."""

    record: Record
    case: LadderCase
    before: Rung | None
    """The last measured rung before it that stays; None for a change alone."""

    @property
    def step(self) -> Summary | None:
        return step_ms(self.record)

    @property
    def host(self) -> HostShare | None:
        """Share of the step in which the GPU waits for the CPU."""
        return host_bound(self.record)

    @property
    def peak(self) -> float | None:
        """Peak memory; None on a CPU, where only the growth of the process is known."""
        on_cpu = self.record.environment.device_kind == "cpu"
        return None if on_cpu else self.record.quantity("peak_bytes")

    @property
    def gain(self) -> float | None:
        """Speedup over the rung before; None where only that rung is a CUDA graph, because the
        ratio would then measure the graph."""
        before = self.before
        if before is None or (before.case.graph and not self.case.graph):
            return None
        return before.step.median / self.step.median if before.step and self.step else None


class Ladder(NamedTuple):
    """All rungs of one model, context and batch."""

    rungs: tuple[Rung, ...]

    @property
    def name(self) -> str:
        case = self.rungs[0].case
        return f"{case.model_name} at context {case.context}, batch {case.batch}"

    @property
    def start(self) -> Summary | None:
        return next((r.step for r in self.rungs if r.case.rung == START and r.step), None)

    @property
    def climb(self) -> list[tuple[Rung, Summary]]:
        """The baseline, then each measured rung on top of those before it."""
        return [(r, r.step) for r in self.rungs if r.case.how != "alone" and r.step]


def ladders(results: Sequence[Result[StepCase]]) -> list[Ladder]:
    def step(result: Result[LadderCase]) -> tuple[object, ...]:
        case = result.case
        overrides = tuple(sorted(case.overrides.items()))
        return case.table, case.size, case.context, case.batch, overrides

    groups = grouped(results_of(results, LadderCase), step)
    return [Ladder(_rungs(group)) for group in groups.values()]


def _rungs(results: Sequence[Result[LadderCase]]) -> tuple[Rung, ...]:
    rungs: list[Rung] = []
    before = None
    for record, case in sorted(results, key=lambda r: (_ORDER[r.case.rung], r.case.how != "alone")):
        climbs = case.how != "alone"
        rung = Rung(record, case, before if climbs else None)
        rungs.append(rung)
        if climbs and rung.step and (case.rung == START or RUNGS[case.rung].stays):
            before = rung
    return tuple(rungs)
