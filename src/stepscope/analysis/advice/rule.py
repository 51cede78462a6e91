"""What advice is, and the rules that give it: each says when a change applies and what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from stepscope.analysis.advice.facts import Facts

WORTH = 0.03
"""Below this share of the step, or of the peak memory, a change is not advised."""
TIGHT = 0.8
"""Above this share of the device's memory a step has no room left."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    title: str
    gain_ms: float
    """Of a step; below zero where it costs time."""
    low_ms: float | None = None
    high_ms: float | None = None
    """The range of the gain, from the back-test of the rule on this kind of device and the noise of
    the step; None in advice that was given without one."""
    ranked: bool = True
    """The range lies above zero. A gain that the noise may hide has no rank."""
    gain_bytes: int = 0
    why: str
    risk: str
    lines: tuple[str, ...]
    """What to write."""
    setting: dict[str, str] = {}
    """What makes the change from outside; empty where only the program's author can make it."""
    by_author: str = ""
    """Why only the author can."""
    factor: float = 1.0
    """By which past verifications on this device have corrected the gain."""


class Judged(NamedTuple):
    advice: Advice
    after: Facts
    """The step with the change made."""


Judge = Callable[[Facts], Judged | None]
JUDGES: list[Judge] = []


def judge(judge: Judge) -> Judge:
    JUDGES.append(judge)
    return judge


def is_faster(advice: Advice, facts: Facts) -> bool:
    """By enough to be worth it for that alone."""
    return advice.gain_ms >= WORTH * facts.step_ms


def worth(advice: Advice, facts: Facts) -> bool:
    if is_faster(advice, facts):
        return True
    if not facts.peak_bytes or advice.gain_bytes < WORTH * facts.peak_bytes:
        return False
    # Memory is worth time only where there is none left.
    return advice.gain_ms >= 0 or facts.is_tight(TIGHT)
