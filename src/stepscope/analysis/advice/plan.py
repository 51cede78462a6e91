"""Order of the trials: the combination that is predicted best, what it gains from each of its
changes, then what could be added.

The next trial follows from the results so far alone, so that an interrupted search continues where
it ended, and one with a time limit has tried the most promising combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, NamedTuple

from stepscope.analysis.advice.ranges import gain_range
from stepscope.analysis.advice.rule import WORTH, Advice
from stepscope.analysis.advice.search import Combination, Space
from stepscope.analysis.advice.stopping import faster
from stepscope.records.stats import Ratio

_COMPARABLE = 1.1
"""Predicted time over that of the best combination up to which another one, which replaces a change
of it, is tried: predictions are not exact."""

Purpose = Literal["best predicted", "without one", "one more", "alone"]


class Result(NamedTuple):
    """What a trial has shown."""

    advice: tuple[Advice, ...]
    ratio: Ratio | None
    """Time of the changed step over the unchanged one; None if it was not measured."""
    works: bool
    """The changes could be made, and the losses agree."""
    refuted: frozenset[str] = frozenset()
    """Those of its changes that could not be made."""

    @property
    def codes(self) -> frozenset[str]:
        return frozenset(one.code for one in self.advice)


class Planned(NamedTuple):
    combination: Combination
    purpose: Purpose


class Plan:
    """The trials of a space of combinations, given the results so far."""

    def __init__(
        self,
        space: Space,
        results: Sequence[Result],
        switchable: Callable[[Advice], bool] = lambda _: False,
        without: Collection[str] = (),
    ) -> None:
        """`without` are codes of changes that there is no time for."""
        self._space, self._results = space, results
        self._switchable = switchable
        """Whether a running program can leave out a change: such trials cost only their steps."""
        self._measured = {one.codes: one.ratio for one in results if one.works and one.ratio}
        self._made = {one.codes: one.advice for one in results}
        self._refuted = frozenset(without).union(*(one.refuted for one in results))
        self._refuted |= {c for r in results if not r.works and len(r.codes) == 1 for c in r.codes}
        self._failed = [one.codes for one in results if not one.works]
        self._alone = {one.code for one in space.alone}

    @property
    def best(self) -> frozenset[str]:
        """The changes of the best combination so far. One of fewer changes replaces it unless it
        is slower."""
        best: frozenset[str] = frozenset()
        for codes, ratio in self._measured.items():
            known = self._measured.get(best)
            if codes & self._alone:
                continue
            if known is None or (
                not faster(known, ratio) if codes < best else faster(ratio, known)
            ):
                best = codes
        return best

    @property
    def best_ratio(self) -> Ratio | None:
        return self._measured.get(self.best)

    def next(self) -> Planned | None:
        """Return the next trial; None if nothing is left that is predicted to gain."""
        return next(self.trials(), None)

    def trials(self) -> Iterator[Planned]:
        """Yield the trials that are left, the next one first."""
        best = self.best
        if not best:
            first = self._first()
            if first is not None:
                yield Planned(first, "best predicted")
        else:
            yield from (Planned(one, "without one") for one in self._without_one(best))
            added = self._one_more(best)
            if added is not None:
                yield Planned(added, "one more")
        for one in self._space.alone:
            if frozenset((one.code,)) not in self._tried and self._is_wanted(one):
                yield Planned(Combination((one,), 0.0, self._space.facts), "alone")

    @property
    def _tried(self) -> set[frozenset[str]]:
        return {one.codes for one in self._results}

    def _is_wanted(self, advice: Advice) -> bool:
        return bool(self._space.only) or advice.gain_ms >= WORTH * self._space.facts.step_ms

    def _is_excluded(self, codes: frozenset[str]) -> bool:
        return bool(codes & self._refuted) or any(failed <= codes for failed in self._failed)

    def _first(self) -> Combination | None:
        """Return the combination with the best prediction among those that may work. Changes that
        are named by the user are tried whatever is predicted."""
        best = self._space.best(without=self._refuted)
        if best is None:
            named = (self._space.best((c,), self._refuted) for c in sorted(self._space.only))
            best = next((one for one in named if one is not None), None)
        while best is not None and self._is_excluded(best.codes):
            # Some of its changes do not work together: leave out what is predicted to gain least.
            left = [self._space.without(best, one.code) for one in best.advice]
            allowed = [one for one in left if one.advice]
            best = min(allowed, key=lambda one: (self._is_excluded(one.codes), one.step_ms),
                       default=None)  # fmt: skip
        return best

    @property
    def _codes(self) -> frozenset[str]:
        return frozenset(entry.code for entry in self._space.entries())

    def _without_one(self, best: frozenset[str]) -> Iterator[Combination]:
        """Yield the best combination without each change whose gain within it is not known, first
        those that a running program can leave out, then those that are most likely not to pay."""
        if len(best) < 2:
            return
        whole = self._space.chain(self._made[best])
        known = {
            code for codes in self._measured if codes >= best for code in best
            if codes - {code} in self._measured
        }  # fmt: skip
        facts = self._space.facts
        open_questions = [one for one in whole.advice if one.code not in known]
        for one in sorted(
            open_questions,
            key=lambda one: (
                not self._switchable(one),
                gain_range(one.code, one.gain_ms, facts)[0],
            ),
        ):
            left = self._space.without(whole, one.code)
            if left.codes not in self._tried and not self._is_excluded(left.codes):
                yield left

    def _one_more(self, best: frozenset[str]) -> Combination | None:
        """Return the best prediction with a change that was not tried: on top of the best
        combination, or in place of changes that exclude it."""
        ratio, seen = self._measured[best], frozenset().union(*self._tried)
        shown = ratio is not None and ratio.high < 1
        whole = self._space.chain(self._made[best])
        found = []
        for code in sorted(self._codes - seen):
            kept = self._compatible(code, whole.advice) if shown else ()
            more = self._space.best({code, *kept}, without=self._refuted | (seen - best))
            if more is None or code not in more.codes or self._is_excluded(more.codes):
                continue
            adds = more.codes > best
            limit = (1 - WORTH if adds else _COMPARABLE) * whole.step_ms
            if more.codes not in self._tried and (self._space.only or more.step_ms <= limit):
                found.append(more)
        return min(found, key=lambda one: one.step_ms, default=None)

    def _compatible(self, code: str, advice: Collection[Advice]) -> list[str]:
        new = self._space.best((code,), without=self._codes - {code})
        if new is None:
            return []
        return [
            one.code for one in advice if not any(map(one.conflicts_with, new.advice))
        ]  # fmt: skip
