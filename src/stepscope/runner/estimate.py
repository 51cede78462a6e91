"""Time that the cases of a run take: from earlier records of the same case, or from measured costs.

`case_costs.json` has the seconds of the cases of preset quick, written by
`scripts/make_case_costs.py` from the records of a run. While a run goes on, the ratio of the
measured to the expected time of its finished cases corrects the rest.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources

import msgspec

from stepscope.records.schema import Environment
from stepscope.records.store import Store
from stepscope.studies.base import PlannedCase
from stepscope.studies.registry import all_studies

COSTS = "case_costs.json"
Key = tuple[str, str]
"""Study and case."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of measured cases on one kind of device."""

    device: str
    """Device on which they were measured."""
    start_s: float
    """Time of a run that no case takes: starting workers, and ceilings if they are not cached."""
    per_case_s: float
    """Mean over all cases, for a study that is not listed."""
    cases: dict[str, dict[str, float]] = {}
    """Seconds by study and case."""


@cache
def measured_costs() -> Mapping[str, Costs]:
    """Costs by kind of device: `cpu`, `cuda`."""
    text = resources.files("stepscope.runner").joinpath(COSTS).read_bytes()
    return msgspec.json.decode(text, type=dict[str, Costs])


class TimeLeft:
    """Expected seconds of cases, corrected by what the finished ones took."""

    def __init__(
        self, cases: Sequence[PlannedCase], earlier: Mapping[Key, float], costs: Costs | None
    ) -> None:
        self._left: dict[Key, None] = dict.fromkeys((case.study, case.key) for case in cases)
        self._earlier, self._costs = earlier, costs
        self._took: dict[Key, float] = {}

    @property
    def start_s(self) -> float:
        return 0.0 if self._costs is None else self._costs.start_s

    def finished(self, study: str, case: str, seconds: float) -> None:
        """A case that the machine cannot run takes no time and says nothing about the others."""
        self._left.pop((study, case), None)
        if seconds > 0:
            self._took[study, case] = seconds

    def seconds(self) -> float | None:
        """Expected time of the remaining cases; None if nothing is known about one of them."""
        pace = self.pace()
        total = 0.0
        for key in self._left:
            one = self._expected(key)
            seconds = one * pace if one is not None else self._like(key[0])
            if seconds is None:
                return None
            total += seconds
        return total

    def _expected(self, key: Key) -> float | None:
        if key in self._earlier:
            return self._earlier[key]
        if self._costs is None or key[0] not in all_studies():
            return None
        known = self._costs.cases.get(key[0], {})
        if not known:
            return self._costs.per_case_s
        return known.get(key[1], statistics.fmean(known.values()))

    def pace(self) -> float:
        """Measured over expected time of the finished cases."""
        both = [(took, one) for key, took in self._took.items() if (one := self._expected(key))]
        predicted = sum(one for _, one in both)
        return sum(took for took, _ in both) / predicted if predicted > 0 else 1.0

    def _like(self, study: str) -> float | None:
        """Mean time of the finished cases of a study, or of all if it has none yet."""
        of_study = [took for (name, _), took in self._took.items() if name == study]
        times = of_study or list(self._took.values())
        return statistics.fmean(times) if times else None


def time_left(cases: Sequence[PlannedCase], store: Store, environment: Environment) -> TimeLeft:
    """The expected time of cases that have no record yet on this device."""
    earlier = store.durations(environment.device_name)
    return TimeLeft(cases, earlier, measured_costs().get(environment.device_kind))
