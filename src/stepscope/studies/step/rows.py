"""Ladders and loss curves: results of the step study, grouped for its views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stepscope.analysis.limits import HostShare, host_bound, step_ms
from stepscope.records.schema import Record
from stepscope.records.stats import Summary
from stepscope.studies.base import Result, results_of
from stepscope.studies.step.cases import LadderCase, LossCase, StepCase
from stepscope.studies.step.ladder import RUNGS, START
from stepscope.views.builders import grouped

TAIL = 10
"""The final loss is the mean over the last 1/TAIL of a curve."""
AGREES_WITHIN = 0.005
"""Largest relative deviation from the float32 loss that counts as the same."""
FALLS_BY = 0.3
"""Smallest relative decrease of the loss that counts as learning."""
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


class LossCurve(NamedTuple):
    """The losses of one rung, by seed."""

    rung: str
    by_seed: dict[int, tuple[float, ...]]
    records: tuple[Record, ...]
    """All records of the rung, failed ones included."""

    def ends(self) -> dict[int, float]:
        """Final loss of each seed: the mean of its last steps."""
        tails = {
            seed: values[-max(1, len(values) // TAIL) :] for seed, values in self.by_seed.items()
        }
        return {seed: sum(tail) / len(tail) for seed, tail in tails.items()}

    def mean(self) -> tuple[float, ...]:
        """Loss of each step, averaged over the seeds."""
        return tuple(sum(step) / len(step) for step in zip(*self.by_seed.values(), strict=False))

    def fell_by(self) -> float | None:
        """Relative decrease from the first loss: the smallest over the seeds."""
        ends = self.ends()
        return min(
            (1 - ends[seed] / values[0] for seed, values in self.by_seed.items()), default=None
        )

    def apart(self, baseline: LossCurve) -> float | None:
        """Relative deviation of the final loss from the same seed of `baseline`, the largest."""
        ends, other = self.ends(), baseline.ends()
        return max(
            (round(ends[seed] / other[seed] - 1, 6) for seed in ends if seed in other),
            key=abs,
            default=None,
        )

    def apart_in_windows(self, baseline: LossCurve, steps: int) -> tuple[float, ...]:
        """Relative deviation from the same seed in windows of `steps` steps, mean over seeds."""
        pairs = [
            (values, baseline.by_seed[seed])
            for seed, values in self.by_seed.items()
            if seed in baseline.by_seed
        ]
        most = min((len(values) for pair in pairs for values in pair), default=0)
        return tuple(
            sum(sum(own[at : at + steps]) / sum(other[at : at + steps]) - 1 for own, other in pairs)
            / len(pairs)
            for at in range(0, most - most % steps, steps)
        )


def loss_curves(results: Sequence[Result[StepCase]]) -> dict[str, LossCurve]:
    groups = grouped(results_of(results, LossCase), lambda result: result.case.rung)
    return {
        rung: LossCurve(
            rung,
            {
                case.seed: series.values
                for record, case in groups[rung]
                if (series := record.find("loss")) is not None and series.values
            },
            tuple(record for record, _ in groups[rung]),
        )
        for rung in _ORDER
        if rung in groups
    }
