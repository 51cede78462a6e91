"""Search over combinations of changes: every consistent one is predicted, the best come first.

A change transforms the model of a step (device and host time of each part), so a combination is
the transformations one after the other. Changes interact: bfloat16 gains nothing while the host
limits the step, and most of it once a CUDA graph has removed the launches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from stepscope.analysis.advice.changes import applicable, predictions
from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.rule import REGISTRY, WORTH, Advice, Prediction, Registered
from stepscope.analysis.advice.timeline import wall_ms

_MOST_STATES = 256
"""Combinations that are extended at once; those with the least device time are kept."""
ORDER = REGISTRY
"""The rules in the order in which a combination applies them."""


class Combination(NamedTuple):
    """Changes that can be made together, and the step with them."""

    advice: tuple[Advice, ...]
    """Each as advised for the step with the ones before it."""
    step_ms: float
    """Predicted time of the step, for the measured number of samples."""
    after: Facts

    @property
    def codes(self) -> frozenset[str]:
        return frozenset(one.code for one in self.advice)


class Space:
    """The combinations of changes for one step that can be made from outside."""

    def __init__(
        self,
        facts: Facts,
        settings: Collection[str],
        factors: Mapping[str, float] | None = None,
        only: Collection[str] = (),
    ) -> None:
        self.facts, self.only = facts, only
        self._settings, self._factors = settings, factors or {}
        self._nothing = Combination((), facts.step_ms, facts)
        self._extended: dict[tuple[int, str], tuple[Combination, Combination | None]] = {}
        """Each combination that was extended, by its identity, with the result: a search asks for
        the same ones again and again."""
        self._advice = {one.code: one for one, _ in predictions(facts)}
        self.alone = tuple(
            one for one in self._reachable(self._advice.values()) if "batch" in one.setting
        )
        """Changes that are never combined: another batch size changes the training."""

    @property
    def known(self) -> frozenset[str]:
        """Codes of the changes that are predicted for the step."""
        return frozenset(self._advice)

    @property
    def reachable(self) -> tuple[Advice, ...]:
        """The changes that are predicted for the step and can be made from outside."""
        return tuple(self._reachable(self._advice.values()))

    def _reachable(self, advice: Iterable[Advice]) -> Iterator[Advice]:
        named = (one for one in advice if not self.only or one.code in self.only)
        return applicable(tuple(named), self._settings)

    def entries(self, without: Collection[str] = ()) -> list[Registered]:
        """Return the rules that take part. A part of a change takes part if the change itself does
        not, a combination of others only on request."""
        usable = {one.code for one in self._reachable(self._advice.values())} - set(without)
        return [
            entry
            for entry in ORDER
            if entry.code not in without
            and (not self.only or entry.code in self.only)
            and (self.only or not (entry.parts or entry.whole in usable))
        ]

    def _apply(self, entry: Registered, before: Combination) -> Combination | None:
        """Return the combination with one more change; None if that is not possible."""
        key = id(before), entry.code
        if key not in self._extended:
            self._extended[key] = before, self._extend(entry, before)
        return self._extended[key][1]

    def _extend(self, entry: Registered, before: Combination) -> Combination | None:
        result = entry.rule(before.after)
        if not isinstance(result, Prediction):
            return None
        advice, after = result
        if "batch" in advice.setting or not any(self._reachable((advice,))):
            return None
        if any(map(advice.conflicts_with, before.advice)):
            return None
        # A correction that was learnt on this device applies to what the change itself gains.
        factor = self._factors.get(advice.code, 1.0) if advice.gain_ms > 0 else 1.0
        step_ms = max(before.step_ms - factor * advice.gain_ms, 1e-3 * self.facts.step_ms)
        after = replace(after, step_ms=wall_ms(after) / after.samples)
        return Combination((*before.advice, advice), step_ms, after)

    def best(
        self, having: Collection[str] = (), without: Collection[str] = ()
    ) -> Combination | None:
        """Return the combination that is predicted to be fastest, with these changes and without
        those, and of the other changes only what gains 3 % of it or more; None if none gains."""
        found = self.combinations(having, without)
        wanted = set(having)
        best = self._lean(min(found, key=lambda one: one.step_ms), wanted) if found else None
        return best if best is not None and best.advice else None

    def combinations(
        self, having: Collection[str] = (), without: Collection[str] = (), *, every: bool = False
    ) -> list[Combination]:
        """Return the consistent combinations. Unless `every` is set, one that leaves out a change
        without a rival that takes time neither on the device nor on the host is not among them: it
        is never faster."""
        states = [self._nothing]
        for entry in self.entries(without):
            extended = []
            for state in states:
                then = self._apply(entry, state)
                if then is not None:
                    extended.append(then)
                free = not every and then is not None and self._is_free(then, state)
                if entry.code in having or free:
                    continue
                extended.append(state)
            states = extended
            if len(states) > _MOST_STATES:
                states = sorted(states, key=lambda one: one.after.device_ms)[:_MOST_STATES]
        return states

    def _is_free(self, then: Combination, before: Combination) -> bool:
        """True if nothing speaks against the last change."""
        last = then.advice[-1]
        rivals = (one for one in self._advice.values() if one.code != last.code)
        return (
            then.step_ms <= before.step_ms
            and then.after.device_ms <= before.after.device_ms
            and then.after.host_ms <= before.after.host_ms
            and not any(map(last.conflicts_with, rivals))
        )

    def _lean(self, combination: Combination, wanted: Collection[str]) -> Combination:
        """Leave out the changes that add less than 3 % of the step to a combination."""
        for one in sorted(combination.advice, key=lambda one: one.gain_ms):
            if one.code not in wanted:
                left = self.without(combination, one.code)
                if left.step_ms <= (1 + WORTH) * combination.step_ms:
                    combination = left
        return combination

    def without(self, combination: Combination, code: str) -> Combination:
        """Return the combination without one change."""
        return self.chain([one for one in combination.advice if one.code != code])

    def chain(self, advice: Collection[Advice]) -> Combination:
        """Return the combination of these changes, whether all are predicted to gain or not."""
        given = {one.code: one for one in advice}
        chained = self._nothing
        for entry in ORDER:
            if entry.code in given:
                then = self._apply(entry, chained)
                chained = then or chained._replace(advice=(*chained.advice, given[entry.code]))
        return chained
