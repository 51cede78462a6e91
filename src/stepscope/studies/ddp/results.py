"""The record of a case of data parallelism: phases and exposed communication by strategy. Pure."""

from __future__ import annotations

from stepscope.analysis.effects import Effect, difference
from stepscope.studies.ddp.cases import ALONE, DDPCase
from stepscope.views.ranks import RankedResult

PHASES = ("forward", "backward", "waited", "optimizer")


class DDPResult(RankedResult[DDPCase]):
    """All strategies timed in one case."""

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(s.variant for s in self.record.series if s.rank == 0))

    @property
    def title(self) -> str:
        at = f" at context {self.case.context}" if self.case.context else ""
        return f"{self.case.size_name}{at}, {self.label}, {self.case.dtype}"

    def phases(self, strategy: str) -> dict[str, float]:
        """Phases of the slowest rank in the median round; they add up to its step time."""
        steps = [s for s in self.record.series if (s.variant, s.name) == (strategy, "step")]
        rounds = [
            max((series.values[index], series.rank, index) for series in steps)
            for index in range(min((len(series.values) for series in steps), default=0))
        ]
        if not rounds:
            return {}
        _, rank, index = sorted(rounds)[(len(rounds) - 1) // 2]
        # There is no wait after a backward pass that averages inside or not at all.
        shown = [
            phase for phase in PHASES if phase != "waited" or self.summary("slowest", strategy)
        ]
        series = {phase: self.record.find(phase, variant=strategy, rank=rank) for phase in shown}
        return {phase: s.values[index] for phase, s in series.items() if s is not None}

    def exposed(self, strategy: str) -> Effect | None:
        """Step time minus that of the step without communication, in ms. Communication does not
        make a step faster: None if the difference is below zero, which is noise."""
        step, alone = self.samples("step", strategy), self.samples("step", ALONE)
        # Rounds are interleaved, so the samples of two strategies are paired.
        exposed = difference(alone, step) if step and alone else None
        return exposed if exposed is not None and exposed.value >= 0 else None

    def exposed_ms(self, strategy: str) -> float | None:
        exposed = self.exposed(strategy)
        return exposed.value if exposed else None
