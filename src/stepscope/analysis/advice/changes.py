"""All known changes, evaluated for one step and ranked.

They are the files of `rules`, and the modules that the environment variable STEPSCOPE_CHANGES
names, which must load without torch:

    STEPSCOPE_CHANGES=mylab.faster_norms stepscope advise --verify train.py
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Collection, Iterator, Sequence
from importlib import import_module

import msgspec

from stepscope.analysis.advice import rules
from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.program import SETTINGS, setting_of
from stepscope.analysis.advice.ranges import gain_range
from stepscope.analysis.advice.rule import (
    REGISTRY,
    WORTH,
    Advice,
    Left,
    NotApplicable,
    Prediction,
    is_faster,
    worth,
)
from stepscope.analysis.advice.timeline import wall_ms
from stepscope.errors import UsageError

__all__ = [
    "SETTINGS",
    "WORTH",
    "Advice",
    "advise",
    "afterwards",
    "applicable",
    "compatible",
    "load_changes",
    "not_applicable",
    "predictions",
    "setting_of",
    "without_ranks",
]


def load_changes() -> None:
    """Import the files of all changes, each of which registers itself."""
    for file in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
        import_module(file.name)
    for name in os.environ.get("STEPSCOPE_CHANGES", "").replace(",", " ").split():
        try:
            import_module(name)
        except ImportError as error:
            raise UsageError(f"STEPSCOPE_CHANGES names {name}: {error}") from error


load_changes()

_ALWAYS_LISTED = ("fused-attention", "attention-fast-path")
"""Naive attention often takes the most memory of a step, whatever it costs in time."""
_DTYPES_FIRST = ("bfloat16", "tf32")
"""Changes after which another one may gain time that it does not gain alone."""


def predictions(facts: Facts) -> Iterator[Prediction]:
    """Yield the result of every rule that applies to the step, worth it or not."""
    results = (entry.rule(facts) for entry in REGISTRY)
    return (result for result in results if isinstance(result, Prediction))


def not_applicable(facts: Facts) -> tuple[NotApplicable, ...]:
    """Return the changes that do not apply to the step, each with the reason."""
    results = ((entry, entry.rule(facts)) for entry in REGISTRY)
    return tuple(
        NotApplicable(entry.code, entry.title, result.reason)
        for entry, result in results
        if isinstance(result, Left)
    )


def advise(facts: Facts, factors: dict[str, float] | None = None) -> tuple[Advice, ...]:
    """Return the changes that are worth making, best first, and fused attention in any case.

    `factors` are corrections of the predictions learnt from past verifications. Changes whose
    range of gains lies above zero come first, sorted by the lower end of that range. The others
    follow without a rank, sorted by predicted gain. If the step's times cannot be trusted, no
    change has a rank.
    """
    advised = []
    for advice, _ in predictions(facts):
        factor = (factors or {}).get(advice.code, 1.0) if advice.gain_ms > 0 else 1.0
        advice = msgspec.structs.replace(advice, gain_ms=advice.gain_ms * factor, factor=factor)
        if worth(advice, facts):
            advice = with_range(advice, facts)
            advised.append(advice if is_faster(advice, facts) else _for_memory(advice))
        elif advice.code in _ALWAYS_LISTED:
            advice = with_range(_on_top(advice, facts), facts)
            advised.append(msgspec.structs.replace(advice, ranked=False))
    return without_ranks(advised) if facts.doubt else tuple(sorted(advised, key=_rank))


def without_ranks(advice: Sequence[Advice]) -> tuple[Advice, ...]:
    """Sort by code and drop the ranks: gains predicted from untrusted times are no gains; for an
    order see `order.py`."""
    replaced = (msgspec.structs.replace(one, ranked=False) for one in advice)
    return tuple(sorted(replaced, key=lambda one: one.code))


def with_range(advice: Advice, facts: Facts) -> Advice:
    """Return the advice with the range of its gain, and a rank if that lies above zero."""
    low, high = gain_range(advice.code, advice.gain_ms, facts)
    return msgspec.structs.replace(advice, low_ms=low, high_ms=high, ranked=low > 0)


def _rank(advice: Advice) -> tuple[bool, float, str]:
    assert advice.low_ms is not None
    return not advice.ranked, -(advice.low_ms if advice.ranked else advice.gain_ms), advice.code


def _on_top(advice: Advice, facts: Facts) -> Advice:
    """Add what a change gains on top of another dtype, if it gains no time alone."""
    if advice.gain_ms > 0:
        return advice
    for first in _DTYPES_FIRST:
        after = afterwards(facts, [first])
        then = next((one for one, _ in predictions(after) if one.code == advice.code), None)
        if after is not facts and then is not None and is_faster(then, after):
            title = next(entry.title for entry in REGISTRY if entry.code == first)
            return msgspec.structs.replace(
                advice,
                best_after=title,
                gain_after_ms=then.gain_ms,
                why=f"{advice.why}. In {facts.dtype} the fused kernel is slower; with {title} it"
                f" gains {then.gain_ms:.3g} ms more",
            )
    return advice


def _for_memory(advice: Advice) -> Advice:
    return msgspec.structs.replace(advice, why=f"{advice.why}. Listed only for the memory it saves")


def afterwards(facts: Facts, codes: Sequence[str]) -> Facts:
    """Apply these changes to the step one after the other, as far as they still apply."""
    for code in codes:
        change = next((one for one in predictions(facts) if one.advice.code == code), None)
        if change is not None:
            after = change.after
            facts = msgspec.structs.replace(after, step_ms=wall_ms(after) / after.samples)
    return facts


def applicable(advice: Sequence[Advice], settings: Collection[str]) -> Iterator[Advice]:
    """Yield the changes that can be applied without the author, given the available settings."""
    return (one for one in advice if one.setting and set(one.setting) <= set(settings))


def compatible(advice: Sequence[Advice]) -> tuple[Advice, ...]:
    """Return changes that can be applied together: of several that conflict, the first."""
    chosen: list[Advice] = []
    for one in advice:
        if not any(one.conflicts_with(other) for other in chosen):
            chosen.append(one)
    return tuple(chosen)
