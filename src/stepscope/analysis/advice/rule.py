"""What advice is, and the rules that give it: each says when a change applies and what it gains."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from stepscope.analysis.advice.facts import Facts

WORTH = 0.03
"""Below this share of the step, or of the peak memory, a change is not advised."""
TIGHT = 0.8
"""Above this share of the device's memory a step has no room left."""

Judge = Callable[[Facts], "Advice | None"]
JUDGES: list[Judge] = []


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    title: str
    gain_ms: float
    """Of a step; below zero where it costs time."""
    gain_bytes: int = 0
    why: str
    risk: str
    lines: tuple[str, ...]
    """What to write."""
    setting: dict[str, str] = {}
    """What makes the change from outside; empty where only the program's author can make it."""
    factor: float = 1.0
    """By which past verifications on this device have corrected the gain."""


def judge(judge: Judge) -> Judge:
    JUDGES.append(judge)
    return judge


def worth(advice: Advice, facts: Facts) -> bool:
    if advice.gain_ms >= WORTH * facts.step_ms:
        return True
    if not facts.peak_bytes or advice.gain_bytes < WORTH * facts.peak_bytes:
        return False
    # Memory is worth time only where there is none left.
    return advice.gain_ms >= 0 or facts.is_tight(TIGHT)


def shortened(facts: Facts, less_on_device: float) -> float:
    """How much shorter the step gets when the device has that much less to do."""
    if not facts.on_gpu or facts.issue_ms is None:
        return less_on_device
    return max(0.0, min(less_on_device, facts.step_ms - min(facts.step_ms, facts.issue_ms)))
