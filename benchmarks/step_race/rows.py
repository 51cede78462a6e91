"""Results of races: times, ratios, memory and power of each side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from step_race.cases import StepRaceCase
from step_race.energy import Draw, draw
from step_race.races import RACES, Heat, RaceSpec
from stepscope.analysis.effects import Effect, interval_of
from stepscope.analysis.limits import matrix_ceiling, share_of
from stepscope.analysis.verdict import Share
from stepscope.records.schema import Record
from stepscope.records.stats import Ratio, paired_ratio, ratio_interval, summarize
from stepscope.studies.base import Result
from stepscope.views.builders import grouped


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


def races(results: Sequence[Result[StepRaceCase]]) -> list[StepRace]:
    """Races by name, in the order of `RACES`.

    Of several races of one step, the one with the most variants of PyTorch counts, because its
    fastest is known only among those; ties go to the race in which PyTorch comes closest.
    """
    ran = [_race(record, case.race) for record, case in results]
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
