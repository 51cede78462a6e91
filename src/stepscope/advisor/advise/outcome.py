"""Outcome of a trial: predicted and realized gain, loss difference, and verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import msgspec

from stepscope.advisor.advise.cases import (
    BASE,
    CHANGED,
    CPU,
    INSTRUCTIONS,
    ROUNDS_S,
    SHARED,
    START_S,
    Trial,
)
from stepscope.advisor.advise.measure import LEAST_ROUNDS
from stepscope.analysis.advice import order
from stepscope.analysis.advice.calibration import Verified, is_right
from stepscope.analysis.advice.changes import WORTH, Advice
from stepscope.analysis.advice.plan import Result
from stepscope.analysis.advice.rules.accelerate import ACCELERATE
from stepscope.records.schema import Clock, Record
from stepscope.records.stats import (
    FEWEST_ROUNDS,
    Ratio,
    paired_ratio,
    sequential_ratio,
    summarize,
)
from stepscope.report.blocks import Interval
from stepscope.report.format import duration, percent
from stepscope.runner.runner import OUT_OF_TIME

LOSS_WITHIN = 0.05
"""Largest accepted difference of the final losses, relative to the decrease of the loss or to the
loss itself, whichever is larger."""

LOSS_WARNING = 0.01
"""Difference of the final losses from which a kept change has a warning."""

NO_GAIN = "dropped: no gain shown"
SLOWER = "dropped: slower"


class Tried:
    """Record of one trial with derived values."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.trial = msgspec.convert(record.config, Trial)

    @cached_property
    def ratio(self) -> Ratio | None:
        """Time of the changed step over the base step, for the same number of samples."""
        base, changed = (self._times(name) for name in (BASE, CHANGED))
        if not base or not changed:
            return None
        scale = 1 / self.trial.more_samples
        scaled = tuple(scale * value for value in changed)
        if len(base) != len(scaled) or min(*base, *scaled) <= 0.0:
            return None
        if self.trial.sequential and len(base) >= FEWEST_ROUNDS:
            return sequential_ratio(base, scaled)
        return paired_ratio(base, scaled)

    @cached_property
    def work_ratio(self) -> tuple[str, Ratio] | None:
        """What the changed step takes over what the base step takes, of instructions or CPU time,
        and which of them: other work on the machine changes these less than the time."""
        for name, words in ((INSTRUCTIONS, order.INSTRUCTIONS), (CPU, order.CPU_TIME)):
            sides = (self.record.find(name, variant=side) for side in (BASE, CHANGED))
            base, changed = (() if one is None else one.values for one in sides)
            if len(base) == len(changed) >= FEWEST_ROUNDS and min(*base, *changed) > 0:
                scaled = [one / self.trial.more_samples for one in changed]
                return words, sequential_ratio(base, scaled)
        return None

    def _times(self, name: str) -> tuple[float, ...]:
        """Step times of a variant, by the device's clock if there is one; the host's clock includes
        the time to issue."""
        by_clock = {
            s.clock: s.values for s in self.record.series if (s.name, s.variant) == ("step", name)
        }
        order: tuple[Clock, ...] = ("device", "host")
        return next((by_clock[clock] for clock in order if clock in by_clock), ())

    @property
    def base_ms(self) -> float | None:
        values = self._times(BASE)
        return summarize(values).median if values else None

    @property
    def changed_ms(self) -> float | None:
        """Time of the changed step: the unchanged one times the ratio over the rounds."""
        ratio, base = self.ratio, self.base_ms
        return None if ratio is None or base is None else base * ratio.value

    @property
    def predicted_ms(self) -> float | None:
        """Predicted gain, scaled to the base step of this trial: the machine may be slower now."""
        base = self.base_ms
        return None if base is None else base * self.trial.predicted_ms / self.trial.step_ms

    @property
    def predicted_range(self) -> Interval | None:
        """Predicted range of a single change, scaled to the base step; None without a range."""
        predicted, base = self.predicted_ms, self.base_ms
        if predicted is None or base is None or len(self.trial.advice) != 1:
            return None
        (one,) = self.trial.advice
        if one.low_ms is None or one.high_ms is None:
            return None
        scale = base / self.trial.step_ms
        return Interval(value=predicted, low=scale * one.low_ms, high=scale * one.high_ms)

    @property
    def realized_ms(self) -> float | None:
        return None if self.realized is None else self.realized.value

    @property
    def realized(self) -> Interval | None:
        """Realized gain in milliseconds, with its interval."""
        ratio, base = self.ratio, self.base_ms
        if ratio is None or base is None:
            return None
        value, low, high = (base * (1 - one) for one in (ratio.value, ratio.high, ratio.low))
        return Interval(value=value, low=low, high=high)

    @property
    def gain_text(self) -> str:
        """The realized gain with its interval, which is cut a whole step below it."""
        gain, base = self.realized, self.base_ms
        if gain is None or base is None:
            return ""
        least = gain.value - base
        low = f"below {duration(least)}" if gain.low < least else duration(gain.low)
        return f"{duration(gain.value)} [{low}, {duration(gain.high)}]"

    @property
    def without_effect(self) -> str:
        """Reason why the change had no effect; empty if it had one."""
        return self.record.notes.get("without_effect", "")

    @property
    def shares_process(self) -> bool:
        """The changes are a part of those of another trial, in whose process they were timed: its
        losses stand for theirs."""
        return SHARED in self.record.notes

    @property
    def least_s(self) -> float:
        """Time that another such trial takes at least: to start its program and for the fewest
        rounds."""
        start_s, rounds_s = (self.record.quantity(name) for name in (START_S, ROUNDS_S))
        if start_s is None or rounds_s is None:
            return self.record.elapsed_s
        return start_s + LEAST_ROUNDS * rounds_s / len(self._times(BASE))

    @property
    def result(self) -> Result:
        """What the plan of the trials needs to know."""
        missing = self.record.notes.get("missing", "").split(",")
        refuted = frozenset(
            one.code
            for one in self.trial.advice
            for name in missing
            if name in one.setting or (name == ACCELERATE and name in one.setting.values())
        )
        if self.cut_off:
            # What took the time is the compiler, if there is one.
            refuted |= {one.code for one in self.trial.advice if "compile" in one.setting}
        ratio = None if self.without_effect else self.ratio
        return Result(self.trial.advice, ratio, self.works, refuted)

    @property
    def is_vague(self) -> bool:
        """True if the interval is wider than the predicted and the realized gain: such a trial must
        not correct predictions."""
        predicted, realized = self.predicted_ms, self.realized
        if predicted is None or realized is None:
            return True
        return (realized.high - realized.low) / 2 > max(abs(predicted), abs(realized.value))

    @property
    def loss_off(self) -> float | None:
        """Relative difference of the mean losses over the last quarter of the steps."""
        base, changed = (self.record.find("loss", variant=name) for name in (BASE, CHANGED))
        if base is None or changed is None or self.trial.more_samples != 1:
            return None
        steps = min(len(base.values), len(changed.values))
        last = max(1, steps // 4)
        means = [sum(one.values[steps - last : steps]) / last for one in (base, changed)]
        decrease = abs(base.values[0] - means[0])
        return abs(means[1] - means[0]) / max(decrease, abs(means[0]), 1e-12)

    @property
    def same_loss(self) -> bool:
        return self.loss_off is None or self.loss_off <= LOSS_WITHIN

    @property
    def loss_warning(self) -> str:
        """Warning about a loss that differs by more than rounding explains; empty without one."""
        off = self.loss_off
        if off is None or off <= LOSS_WARNING:
            return ""
        return f"the loss differs by {percent(off)}"

    @property
    def verdict(self) -> str:
        if self.record.status != "ok":
            return f"not tried: {self.record.reason or self.record.status}"
        if self.without_effect:
            return f"not applicable: {self.without_effect}"
        if self.ratio is None:
            return "not tried: no step was timed"
        lost = self.record.quantity("loss_lost", variant=CHANGED)
        if lost is not None and self.record.quantity("loss_lost", variant=BASE) is None:
            return f"dropped: the loss is not finite from step {lost:.0f} on"
        if not self.same_loss:
            return "dropped: the loss differs"
        if self.ratio.high < 1:
            if self.shares_process:
                return "kept, its loss compared with more changes"
            compared = (
                self.trial.more_samples != 1 or self.record.find("loss", variant=BASE) is not None
            )
            if not compared:
                return "kept, no loss to compare"
            return f"kept, but {self.loss_warning}" if self.loss_warning else "kept"
        return SLOWER if self.ratio.low > 1 else NO_GAIN

    @property
    def kept(self) -> bool:
        return self.verdict.startswith("kept")

    @property
    def works(self) -> bool:
        """True if the changes could be made and the losses agree, whatever they gained."""
        return self.kept or self.verdict in (NO_GAIN, SLOWER)

    @property
    def cut_off(self) -> bool:
        """True if the time for all trials ended during this one."""
        return OUT_OF_TIME in self.record.reason

    def verified(self) -> Verified | None:
        """Entry for the prediction history; only for single changes that took effect."""
        if len(self.trial.advice) != 1 or self.without_effect:
            return None
        if self.realized_ms is None or self.predicted_ms is None or self.base_ms is None:
            return None
        return Verified(
            device=self.record.environment.device_name,
            code=self.trial.code,
            predicted_ms=self.predicted_ms,
            realized_ms=self.realized_ms,
            step_ms=self.base_ms,
            when=self.record.started,
            factor=self.trial.advice[0].factor,
        )


def attributed(tried: Tried, others: Sequence[Tried]) -> list[Verified]:
    """Return what a trial shows of single changes: it is another one without one of them, or has
    one more."""
    pairs = (sorted((one, tried), key=lambda side: len(side.trial.advice)) for one in others)
    found = (_of_one_change(without, with_it) for without, with_it in pairs)
    return [one for one in found if one is not None]


def _of_one_change(without: Tried, with_it: Tried) -> Verified | None:
    """Return the gain of the only change that a trial has beyond another one; None if it has not
    exactly one more, or if the noise of both is larger."""
    kept = {one.code for one in without.trial.advice}
    more = [one for one in with_it.trial.advice if one.code not in kept]
    before, after = without.realized, with_it.realized
    known = before and after and not (without.without_effect or with_it.without_effect)
    if not (kept and len(more) == 1 == len(with_it.trial.advice) - len(kept) and known):
        return None
    assert before is not None
    assert after is not None
    predicted_ms = (with_it.predicted_ms or 0.0) - (without.predicted_ms or 0.0)
    realized_ms = after.value - before.value
    noise_ms = math.hypot(*((one.high - one.low) / 2 for one in (before, after)))
    if noise_ms > max(abs(predicted_ms), abs(realized_ms)):
        return None
    return Verified(
        device=with_it.record.environment.device_name,
        code=more[0].code,
        predicted_ms=predicted_ms,
        realized_ms=realized_ms,
        step_ms=with_it.base_ms or 0.0,
        when=max(without.record.started, with_it.record.started),
        factor=more[0].factor,
    )


def first_right(advice: Sequence[Advice], tried: Sequence[Tried], most: int = 3) -> tuple[int, int]:
    """Count, among the first `most` advised changes that were tried, those whose gain was within a
    third of the prediction; return that count and the number of changes. A failed trial counts as
    wrong; a change without effect is not counted."""
    single = [one for one in tried if len(one.trial.advice) == 1]
    alone = {one.trial.code: one for one in single if not one.without_effect}
    counted = [alone[one.code] for one in advice if one.code in alone][:most]
    right = [one for one in counted if (v := one.verified()) is not None and is_right(v)]
    return len(right), len(counted)


def work_order(tried: Sequence[Tried]) -> order.Order | None:
    """Return the order of the trials by the work of their steps, of those that show less of it."""
    found = {one: one.work_ratio for one in tried if one.works and not one.without_effect}
    measured = {one: pair for one, pair in found.items() if pair is not None}
    kinds = {by for by, _ in measured.values()}
    if len(kinds) != 1:
        return None
    ratios = {
        (one.trial.code, " + ".join(advice.title for advice in one.trial.advice)): ratio
        for one, (_, ratio) in measured.items()
    }
    return order.measured_order(ratios, kinds.pop())


def undecided(tried: Sequence[Tried]) -> Tried | None:
    """Return the trial with the largest gain among those whose interval includes zero and a gain
    that would be worth a change; None if a change is kept."""
    if any(one.kept for one in tried):
        return None
    possible = [
        one
        for one in tried
        if one.verdict == NO_GAIN and one.realized is not None and one.base_ms is not None
        if one.realized.high >= WORTH * one.base_ms
    ]
    return max(possible, key=lambda one: one.realized_ms or 0.0, default=None)


def why_none(tried: Sequence[Tried]) -> str:
    """Return why no trial was completed; empty if one was, or none was started."""
    if not tried or any(one.realized is not None for one in tried):
        return ""
    reasons = [one.verdict.partition(": ")[2] for one in tried]
    return max(dict.fromkeys(reasons), key=reasons.count)


def best_of(tried: Sequence[Tried]) -> Tried | None:
    """Return the kept trial with the fewest changes among those statistically as fast as the
    fastest."""
    kept = {one: one.ratio for one in tried if one.kept and one.ratio is not None}
    if not kept:
        return None
    fastest = min(kept.values(), key=lambda ratio: ratio.value)
    as_fast = [one for one, ratio in kept.items() if ratio.value <= fastest.high]
    return min(as_fast, key=lambda one: (len(one.trial.advice), kept[one].value))
