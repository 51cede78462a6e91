"""The advice type and the registry of rules; a rule says if a change applies and what it gains."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from typing import NamedTuple

import msgspec

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.timeline import gain_ms

WORTH = 0.03
"""Smallest share of the step time, or of the peak memory, that a change must gain."""
TIGHT = 0.8
"""Share of the device's memory above which memory counts as scarce."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule says of its change, besides the gain in time."""

    gain_bytes: int = 0
    why: str
    risk: str
    lines: tuple[str, ...]
    """Code to write."""
    setting: dict[str, str] = {}
    """Settings that apply the change from outside; empty if only the author can apply it."""
    excludes: tuple[str, ...] = ()
    """Settings of other changes with which it cannot be combined."""
    by_author: str = ""
    """Reason why only the author can apply it."""


class Advice(Proposal, frozen=True, kw_only=True):
    """One suggested change with its predicted gain."""

    code: str
    title: str
    gain_ms: float
    """Gain per step; negative if the change costs time."""
    low_ms: float | None = None
    high_ms: float | None = None
    """Range of the gain, from the back-test of the rule on this kind of device and the noise of
    the step; None in advice that was recorded without one."""
    ranked: bool = True
    """The range lies above zero. A gain that may be noise has no rank."""
    best_after: str = ""
    """Title of the change without which this one gains no time."""
    gain_after_ms: float = 0.0
    """Gain per step on top of that change."""
    factor: float = 1.0
    """Factor by which past verifications on this device have corrected the gain."""

    def conflicts_with(self, other: Advice) -> bool:
        """Return True if the two cannot be applied together."""
        settings, others = set(self.setting), set(other.setting)
        return bool(settings & others or others & {*self.excludes} or settings & {*other.excludes})


class Change(Proposal, frozen=True, kw_only=True):
    """Result of a rule that applies; the registry makes it an advice."""

    after: Facts
    """The step with the change applied."""
    gain_ms: float | None = None
    """None: the gain that the timeline predicts for `after`."""
    code: str = ""
    title: str = ""
    """Code and title, where they differ from those of the rule."""


class Prediction(NamedTuple):
    """A change that applies, as advice, and the step with it."""

    advice: Advice
    after: Facts


class NotApplicable(NamedTuple):
    """A change that does not apply to a step."""

    code: str
    title: str
    reason: str


class Left(msgspec.Struct, frozen=True):
    """Why a change does not apply to a step."""

    reason: str


class Stage(IntEnum):
    """Order in which a combination applies its changes: what a change leaves depends on those
    before it."""

    DTYPE = 0
    KERNELS = 1
    PIECES = 2
    """Those of `stepscope.accelerate`."""
    LOOP = 3
    LAUNCHES = 4
    """Changes that remove the launches that all others leave."""


class Registered(NamedTuple):
    code: str
    title: str
    rule: Callable[[Facts], Prediction | Left | None]
    """Returns its prediction, why the change does not apply, or None if an input is missing."""
    stage: Stage
    whole: str = ""
    """Code of the change that this one is a part of: searched only where that one is not."""
    parts: bool = False
    """The change combines others, which the search combines itself."""


REGISTRY: list[Registered] = []
"""By stage."""

Rule = Callable[[Facts], Change | Left | None]


def rule(
    code: str, title: str, *, stage: Stage = Stage.LOOP, whole: str = "", parts: bool = False
) -> Callable[[Rule], Rule]:
    """Register a rule under the code and the title of its change; see `Registered`."""

    def register(function: Rule) -> Rule:
        @wraps(function)
        def predict(facts: Facts) -> Prediction | Left | None:
            change = function(facts)
            if not isinstance(change, Change):
                return change
            fields = msgspec.structs.asdict(change)
            after = fields.pop("after")
            if change.gain_ms is None:
                fields["gain_ms"] = gain_ms(facts, after)
            if facts.loader_bound and after.data_ms >= facts.data_ms:
                # Whatever else gets faster, the loop waits for the workers instead.
                fields["gain_ms"] = min(0.0, fields["gain_ms"])
            fields |= {"code": change.code or code, "title": change.title or title}
            return Prediction(Advice(**fields), after)

        entry = Registered(code, title, predict, stage, whole, parts)
        # By file, not by which file imports another.
        insort(REGISTRY, entry, key=lambda one: (one.stage, one.rule.__module__))
        return function

    return register


def is_faster(advice: Advice, facts: Facts) -> bool:
    """Return True if the time gained alone makes the change worth it."""
    return advice.gain_ms >= WORTH * facts.step_ms


def worth(advice: Advice, facts: Facts) -> bool:
    """Return True if the change gains enough time or memory to be advised."""
    if is_faster(advice, facts):
        return True
    if not facts.peak_bytes or advice.gain_bytes < WORTH * facts.peak_bytes:
        return False
    # Saving memory justifies extra time only when memory is scarce.
    return advice.gain_ms >= 0 or facts.is_tight(TIGHT)
