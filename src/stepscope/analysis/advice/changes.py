"""Every change that is known here, judged for one step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec

from stepscope.analysis.advice import loop, memory, ranks, work
from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.rule import JUDGES, WORTH, Advice, worth

__all__ = ["RULES", "WORTH", "Advice", "advise", "applicable", "compatible"]

RULES = (work, loop, memory, ranks)


def advise(facts: Facts, factors: dict[str, float] | None = None) -> tuple[Advice, ...]:
    """What is worth it, the largest gain first. `factors` correct predictions by past ones."""
    found = []
    for judge in JUDGES:
        advice = judge(facts)
        if advice is None:
            continue
        factor = (factors or {}).get(advice.code, 1.0) if advice.gain_ms > 0 else 1.0
        advice = msgspec.structs.replace(advice, gain_ms=advice.gain_ms * factor, factor=factor)
        if worth(advice, facts):
            found.append(advice)
    return tuple(sorted(found, key=lambda one: (-one.gain_ms, one.code)))


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
