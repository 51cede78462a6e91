"""Ladders, loss curves and races: results of the step study, grouped for its views."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from stepscope.analysis.effects import Effect, interval_of
from stepscope.analysis.limits import HostShare, host_bound, matrix_ceiling, share_of, step_ms
from stepscope.analysis.power import Draw, draw
from stepscope.analysis.verdict import Share
from stepscope.records.schema import Record
from stepscope.records.stats import Ratio, Summary, paired_ratio, ratio_interval, summarize
from stepscope.studies.base import Result, results_of
from stepscope.studies.step.cases import LadderCase, LossCase, StepCase, StepRaceCase
from stepscope.studies.step.ladder import RUNGS, START
from stepscope.studies.step.races import RACES, Heat, RaceSpec
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


class Lead(NamedTuple):
    """Step times of PyTorch and of one side in consecutive steps, and their ratio."""

    baseline_ms: float
    ms: float
    ratio: Ratio | None
    """Ratio of alternating blocks; None where each side ran one block, for its energy."""

    @property
    def value(self) -> float:
        return self.baseline_ms / self.ms if self.ratio is None else self.ratio.value


class StepRace(NamedTuple):
    """One race: its record, the fastest variant of each side and all trials."""

    record: Record
    name: str
    best: dict[str, str]
    """Name of the fastest variant of each side."""
    heats: dict[str, Heat | str]
    """Trial of every variant, or the reason why it was excluded."""
    others: tuple[StepRace, ...] = ()
    """Races of the same step in other runs."""

    @property
    def spec(self) -> RaceSpec:
        return RACES[self.name]

    @property
    def baselines(self) -> int:
        """Number of variants of PyTorch that ran."""
        return sum(
            isinstance(heat, Heat) and variant.startswith("baseline: ")
            for variant, heat in self.heats.items()
        )

    def blocks(self, side: str) -> tuple[float, ...]:
        """Median step time of each block of consecutive steps, in ms."""
        return self._samples("consecutive", side)

    def _samples(self, name: str, side: str) -> tuple[float, ...]:
        series = self.record.find(name, variant=self.best[side]) if side in self.best else None
        return () if series is None else series.values

    def lead(self, side: str = "stepscope") -> Lead | None:
        """PyTorch against one side in consecutive steps; None if these were not measured."""
        baseline, own = self.blocks("baseline"), self.blocks(side)
        if baseline and own:
            ratio = paired_ratio(own, baseline, level=0.95)
            return Lead(statistics.median(baseline), statistics.median(own), ratio)
        others, alone = self.draw("baseline"), self.draw(side)
        return Lead(others.step_ms, alone.step_ms, None) if others and alone else None

    def ratio(self, side: str = "stepscope") -> Ratio | None:
        """PyTorch's time over that of a side in interleaved samples, each from an idle GPU."""
        baseline, own = self._samples("step", "baseline"), self._samples("step", side)
        return ratio_interval(own, baseline, level=0.95) if baseline and own else None

    def effect(self, side: str = "stepscope") -> Effect:
        """PyTorch's time over that of a side, with its interval: of consecutive steps if these were
        measured, otherwise of interleaved samples."""
        lead, ratio = self.lead(side), self.ratio(side)
        if lead is not None and lead.ratio is not None:
            return interval_of(lead.ratio, len(self.blocks(side)))
        assert ratio is not None
        effect = interval_of(ratio, len(self._samples("step", side)))
        if lead is None:
            return effect
        # One block of consecutive steps has no interval of its own.
        low, high = min(effect.low, lead.value), max(effect.high, lead.value)
        return effect._replace(value=lead.value, low=low, high=high)

    def speedup(self, side: str = "stepscope") -> float | None:
        """Speedup in consecutive steps, or in interleaved samples if the former are missing."""
        lead, ratio = self.lead(side), self.ratio(side)
        return None if ratio is None else ratio.value if lead is None else lead.value

    def step_ms(self, side: str = "stepscope") -> float | None:
        """Median step time in consecutive steps, or of interleaved samples if these are missing."""
        if (lead := self.lead(side)) is not None:
            return lead.ms
        samples = self._samples("step", side)
        return summarize(samples).median if samples else None

    @property
    def mfu_basis(self) -> str:
        """The rate that `mfu` is relative to: the peak of the data sheet, else the ceiling."""
        return "data sheet" if matrix_ceiling(self.record, measured=False) else "measured"

    def mfu(self, side: str = "stepscope") -> Share | None:
        ms, flops = self.step_ms(side), self.record.quantity("flops")
        rate = matrix_ceiling(self.record, measured=self.mfu_basis == "measured")
        if ms is None or flops is None or ms <= 0:
            return None
        return share_of(flops / (ms * 1e-3), rate)

    def peak(self, side: str) -> float | None:
        heat = self.heats.get(self.best.get(side, ""))
        return heat.peak_bytes if isinstance(heat, Heat) else None

    def draw(self, side: str) -> Draw | None:
        return draw(self.record, side)

    def form(self, side: str) -> str:
        return self.best.get(side, "").partition(": ")[2]


def races(results: Sequence[Result[StepCase]]) -> list[StepRace]:
    """Races by name, in the order of `RACES`.

    Of several races of one step, the one with the most variants of PyTorch counts, because its
    fastest is known only among those; ties go to the race in which PyTorch comes closest.
    """
    ran = [_race(record, case.race) for record, case in results_of(results, StepRaceCase)]
    groups = grouped(ran, lambda race: race.name)
    raced = []
    for name in RACES:
        if name in groups:
            first, *others = sorted(
                groups[name], key=lambda race: (-race.baselines, _nearness(race))
            )
            raced.append(first._replace(others=tuple(others)))
    return raced


def _race(record: Record, name: str) -> StepRace:
    heats = record.attachment("heats", dict[str, Heat]) or {}
    if record.environment.device_kind == "cpu":
        heats = {
            name: msgspec.structs.replace(heat, peak_bytes=None) for name, heat in heats.items()
        }
    excluded = record.attachment("excluded", dict[str, str]) or {}
    best = record.attachment("best", dict[str, str]) or {}
    return StepRace(record, name, best, {**heats, **excluded})


def _nearness(race: StepRace) -> float:
    ratio = race.ratio()
    return float("inf") if ratio is None else ratio.value
