"""Rules that could not be evaluated because a record lacks an input.

A rule belongs here if it returns nothing for the recorded step but would return advice with the
missing input, whatever its value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from stepscope.analysis.advice.changes import predictions
from stepscope.analysis.advice.facts import Facts

RATES, BANDWIDTH, MEMORY = "matmul rates", "memory bandwidth", "memory ledger"
_SLOW_TO_FAST = {"float32": 1.0, "tf32": 2.0, "bfloat16": 4.0, "float16": 4.0, "fp8": 8.0}
_FAST_TO_SLOW = {name: 1 / rate for name, rate in _SLOW_TO_FAST.items()}


class NotEvaluated(NamedTuple):
    """A rule that could not be evaluated."""

    code: str
    title: str
    missing: str
    """Missing input, one of the names above."""


def not_evaluated(facts: Facts) -> tuple[NotEvaluated, ...]:
    """Return the rules that a missing input prevented, each with the first such input."""
    known = {one.advice.code for one in predictions(facts)}
    rules: dict[str, NotEvaluated] = {}
    for missing, probe in _probes(facts):
        for advice, _ in predictions(probe):
            if advice.code not in known:
                rules.setdefault(advice.code, NotEvaluated(advice.code, advice.title, missing))
    return tuple(rules.values())


def _probes(facts: Facts) -> Iterator[tuple[str, Facts]]:
    """Yield the step with each missing input filled in."""
    if facts.dtype not in facts.rates:
        for rates in (_SLOW_TO_FAST, _FAST_TO_SLOW):
            yield RATES, replace(facts, rates=rates)
    if not facts.bandwidth:
        yield BANDWIDTH, replace(facts, bandwidth=1.0)
    if not facts.saved_bytes and facts.memory_bytes and facts.on_gpu:
        full = facts.memory_bytes
        yield MEMORY, replace(facts, saved_bytes=full, peak_bytes=full)
