"""Advice from a trace alone: the rules that need no rerun, and what the trace does not show.

The profiler slows the CPU down, by an unknown factor: on an H200 it more than doubles the time to
launch. Every gain is therefore predicted twice, with the traced idle time and with half of it, and
its range covers both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from stepscope.advisor.advise.facts import facts_of_trace
from stepscope.analysis.advice.changes import WORTH, Advice, advise, compatible, without_ranks
from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.missing_inputs import RATES, not_evaluated
from stepscope.analysis.advice.ranges import gain_range
from stepscope.analysis.advice.rule import REGISTRY
from stepscope.analysis.trace.summary import Summary
from stepscope.analysis.verdict import Gain, RankedChange, ranked

_WITHOUT_PROFILER = 0.5
"""Share of the traced idle time caused by the CPU that may remain without the profiler."""
_NEEDS_MEMORY = ("larger-batch", "checkpoint", "no-checkpoint")
"""Changes that a trace cannot judge, because it does not contain the memory of the step."""


class TraceAdvice(NamedTuple):
    """Changes, best first, and what could not be known."""

    advice: tuple[Advice, ...]
    unknown: tuple[str, ...]
    not_evaluated: tuple[str, ...] = ()
    """Titles of changes that the trace lacks an input for."""

    def changes(self) -> tuple[RankedChange, ...]:
        """Return the ranked changes of a verdict, without alternatives to a larger one."""
        shown = compatible([one for one in self.advice if one.ranked])
        return ranked([_change(one) for one in shown])

    def uncertain(self, step_ms: float) -> RankedChange | None:
        """Return the largest gain that may be none, if it would be worth a change."""
        gains = [one for one in self.advice if one.gain_ms >= WORTH * step_ms]
        most = max(gains, key=lambda one: one.gain_ms, default=None)
        return None if most is None else _change(most)


def _change(advice: Advice) -> RankedChange:
    low, high = (advice.gain_ms if end is None else end for end in (advice.low_ms, advice.high_ms))
    return RankedChange(
        code=advice.code,
        title=advice.title,
        gain=Gain(value=advice.gain_ms, low=low, high=high),
        risk=advice.risk,
        lines=advice.lines,
        setting=next(iter(advice.setting), ""),
    )


def advise_from_trace(summary: Summary, ranks: int = 1, sent: int = 0) -> TraceAdvice:
    """Apply the rules to a trace. `sent` are the bytes that a rank all-reduces in a step."""
    traced = facts_of_trace(summary, ranks=ranks, sent=sent)
    lean = facts_of_trace(summary, _WITHOUT_PROFILER, ranks, sent)
    without = {one.code: one for one in advise(lean)}
    merged = [
        _covering(one, without.get(one.code), lean)
        for one in advise(traced)
        if one.gain_ms > 0 and one.code not in _NEEDS_MEMORY
    ]
    order = sorted(merged, key=lambda one: (not one.ranked, -(one.low_ms or 0.0), one.code))
    return TraceAdvice(
        without_ranks(order) if traced.doubt else tuple(order),
        tuple(_unknown(summary, traced)),
        tuple(dict.fromkeys(_not_evaluated(traced))),
    )


def _covering(traced: Advice, lean: Advice | None, facts: Facts) -> Advice:
    """Return the advice with a range that covers both predictions; a change that is not worth
    making without the profiler may gain nothing."""
    low, high = traced.low_ms or 0.0, traced.high_ms or traced.gain_ms
    if lean is None:
        return replace(traced, gain_ms=traced.gain_ms / 2, low_ms=min(0.0, low), ranked=False)
    other = gain_range(lean.code, lean.gain_ms, facts)
    low, high = min(low, other[0]), max(high, other[1])
    gain = (traced.gain_ms + lean.gain_ms) / 2
    return replace(traced, gain_ms=gain, low_ms=low, high_ms=high, ranked=low > 0)


def _not_evaluated(facts: Facts) -> Iterator[str]:
    """Yield the titles of changes for which the trace lacks a rate, parameters or memory."""
    titles = {entry.code: entry.title for entry in REGISTRY}
    yield from (one.title for one in not_evaluated(facts))
    yield from _need_parameters(facts)
    yield from (titles[code] for code in _NEEDS_MEMORY)


def _need_parameters(facts: Facts) -> list[str]:
    if facts.parameters:
        return []
    return [
        *(["fused optimizer"] if facts.bandwidth and not facts.fused_optimizer else []),
        *(["gradient buckets"] if facts.ranks > 1 and facts.exposed_ms > 0 else []),
    ]


def _unknown(summary: Summary, facts: Facts) -> Iterator[str]:
    if summary.on_device and summary.idle_of("CPU"):
        yield "how much of the idle time the profiler causes: gains cover none to half of it"
    if not facts.dtype:
        yield "the dtype of the matmuls: no kernel names its unit"
    missing: dict[str, list[str]] = {}
    for one in not_evaluated(facts):
        if one.code not in _NEEDS_MEMORY:
            missing.setdefault(one.missing, []).append(one.title)
    for name, titles in missing.items():
        why = f": the data sheet of {summary.device or 'this device'} is not known"
        yield f"{name}{why if name == RATES or facts.bandwidth is None else ''} ({_listed(titles)})"
    if needed := _need_parameters(facts):
        yield f"the number of parameters ({_listed(needed)})"
    yield "memory: peak, batch size and activation checkpointing"
    yield "the loss: whether a change alters it"


def _listed(titles: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(titles))
