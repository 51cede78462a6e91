"""Loss curves by rung."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from step_loss.cases import LossCase
from stepscope.records.schema import Record
from stepscope.studies.base import Result
from stepscope.studies.step.ladder import RUNGS, START
from stepscope.views.builders import grouped

TAIL = 10
"""The final loss is the mean over the last 1/TAIL of a curve."""
AGREES_WITHIN = 0.005
"""Largest relative deviation from the float32 loss that counts as the same."""
FALLS_BY = 0.3
"""Smallest relative decrease of the loss that counts as learning."""
_ORDER = (START, *RUNGS)


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


def loss_curves(results: Sequence[Result[LossCase]]) -> dict[str, LossCurve]:
    groups = grouped(results, lambda result: result.case.rung)
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
