"""Every change that is known here, judged for one step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec

from stepscope.analysis.advice import dtypes, loop, memory, ranks, work
from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.ranges import gain_range
from stepscope.analysis.advice.rule import JUDGES, WORTH, Advice, Judged, is_faster, worth
from stepscope.analysis.advice.timeline import wall_ms

__all__ = [
    "RULES", "WORTH", "Advice", "advise", "afterwards", "applicable", "compatible", "without_ranks",
]  # fmt: skip

RULES = (dtypes, work, loop, memory, ranks)


def judged(facts: Facts) -> Iterator[Judged]:
    """What each rule says of a step, worth it or not."""
    return (found for judge in JUDGES if (found := judge(facts)) is not None)


def advise(facts: Facts, factors: dict[str, float] | None = None) -> tuple[Advice, ...]:
    """The changes that are worth it. `factors` correct predictions by past ones.

    Those whose range lies above zero come first, the largest lower end first; the others follow
    without a rank, the largest prediction first. Of a step whose times cannot be trusted none has
    a rank.
    """
    found = []
    for advice, _ in judged(facts):
        factor = (factors or {}).get(advice.code, 1.0) if advice.gain_ms > 0 else 1.0
        advice = msgspec.structs.replace(advice, gain_ms=advice.gain_ms * factor, factor=factor)
        if worth(advice, facts):
            advice = _with_range(advice, facts)
            found.append(advice if is_faster(advice, facts) else _for_memory(advice))
    return without_ranks(found) if facts.doubt else tuple(sorted(found, key=_rank))


def without_ranks(advice: Sequence[Advice]) -> tuple[Advice, ...]:
    """In the order of their names: gains of untrusted times are no order."""
    replaced = (msgspec.structs.replace(one, ranked=False) for one in advice)
    return tuple(sorted(replaced, key=lambda one: one.code))


def _with_range(advice: Advice, facts: Facts) -> Advice:
    low, high = gain_range(advice.code, advice.gain_ms, facts)
    return msgspec.structs.replace(advice, low_ms=low, high_ms=high, ranked=low > 0)


def _rank(advice: Advice) -> tuple[bool, float, str]:
    assert advice.low_ms is not None
    return not advice.ranked, -(advice.low_ms if advice.ranked else advice.gain_ms), advice.code


def _for_memory(advice: Advice) -> Advice:
    return msgspec.structs.replace(advice, why=f"{advice.why}. Listed for its memory alone")


def afterwards(facts: Facts, codes: Sequence[str]) -> Facts:
    """The step with these changes made, one after the other, as far as they still apply."""
    for code in codes:
        found = next((one for one in judged(facts) if one.advice.code == code), None)
        if found is not None:
            after = found.after
            facts = msgspec.structs.replace(after, step_ms=wall_ms(after) / after.samples)
    return facts


def applicable(advice: Sequence[Advice], settings: Collection[str]) -> Iterator[Advice]:
    """Those that can be tried without the author, where these settings can be changed."""
    return (one for one in advice if one.setting and set(one.setting) <= set(settings))


def compatible(advice: Sequence[Advice]) -> tuple[Advice, ...]:
    """Those that can be made together: of several for one setting, the first."""
    taken: set[str] = set()
    found = []
    for one in advice:
        if not taken & set(one.setting):
            found.append(one)
            taken |= set(one.setting)
    return tuple(found)
