"""A recorded step with what follows from it, each built once: facts, advice, combinations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

from stepscope.advisor.advise.cases import OF_MODELS, OF_SCRIPTS
from stepscope.advisor.advise.facts import facts_of
from stepscope.advisor.advise.given import advice_given
from stepscope.advisor.advise.history import read_history
from stepscope.analysis.advice.calibration import factors
from stepscope.analysis.advice.changes import (
    Advice,
    advise,
    not_applicable,
    with_range,
    without_ranks,
)
from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.missing_inputs import NotEvaluated, not_evaluated
from stepscope.analysis.advice.rule import NotApplicable
from stepscope.analysis.advice.search import Space
from stepscope.records.schema import Record
from stepscope.views.program.cases import STUDY_NAME as INSPECTED


class RecordedStep:
    """The step of a record. `lacks` are features that the machine does not have; corrections are
    those of changes verified on this device before the time `before`, so that a resumed run gives
    the same advice again."""

    def __init__(
        self, record: Record, lacks: Sequence[str] = (), before: str | None = None
    ) -> None:
        self.record = record
        self._lacks, self._before = lacks, before

    @cached_property
    def facts(self) -> Facts:
        return facts_of(self.record, lacks=self._lacks)

    @cached_property
    def factors(self) -> dict[str, float]:
        past = [one for one in read_history() if self._before is None or one.when < self._before]
        return factors(past, self.record.environment.device_name)

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """The advice that is stored with the record, or that of today's rules."""
        given = advice_given(self.record)
        if given is None:
            return advise(self.facts, self.factors)
        # Advice stored with an older record has ranks.
        return without_ranks(given) if self.facts.doubt else given

    @cached_property
    def advice_of_rules(self) -> tuple[Advice, ...]:
        """The advice stored with the record, then what newer rules add to it."""
        advice = advise(self.facts)
        if (given := advice_given(self.record)) is not None:
            codes = {one.code for one in given}
            stored = (
                one if one.low_ms is not None else with_range(one, self.facts) for one in given
            )
            advice = (*stored, *(one for one in advice if one.code not in codes))
        return without_ranks(advice) if self.facts.doubt else advice

    @cached_property
    def not_applicable(self) -> tuple[NotApplicable, ...]:
        return not_applicable(self.facts)

    @cached_property
    def not_evaluated(self) -> tuple[NotEvaluated, ...]:
        return not_evaluated(self.facts)

    @property
    def settings(self) -> frozenset[str]:
        """Settings that can be changed from outside."""
        return OF_SCRIPTS if self.record.study == INSPECTED else OF_MODELS

    def space(self, only: Collection[str] = ()) -> Space:
        return Space(self.facts, self.settings, self.factors, only)
