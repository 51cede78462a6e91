"""Trials of advice that ran: predicted and realised gain, and what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec

from stepscope.advisor.advise.cases import BASE, CHANGED, Trial
from stepscope.analysis.advice.calibration import Verified, is_right
from stepscope.analysis.advice.changes import Advice
from stepscope.records.schema import Clock, Record
from stepscope.records.stats import Ratio, paired_ratio, summarize
from stepscope.report.blocks import Interval

LOSS_WITHIN = 0.05
"""How far the losses of the last steps may be apart, as a share of how far the loss has come or of
itself, whichever is more."""

NO_GAIN = "dropped: no gain shown"


class Tried:
    """One trial that ran."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.trial = msgspec.convert(record.config, Trial)

    @cached_property
    def ratio(self) -> Ratio | None:
        """Time of the changed step over the base's, for as many samples."""
        base, changed = (self._times(name) for name in (BASE, CHANGED))
        if not base or not changed:
            return None
        scale = 1 / self.trial.more_samples
        scaled = tuple(scale * value for value in changed)
        if len(base) != len(scaled) or min(*base, *scaled) <= 0.0:
            return None
        return paired_ratio(base, scaled)

    def _times(self, name: str) -> tuple[float, ...]:
        """By the wall: the host's clock includes what it takes to issue."""
        found = {
            s.clock: s.values for s in self.record.series if (s.name, s.variant) == ("step", name)
        }
        order: tuple[Clock, ...] = ("device", "host")
        return next((found[clock] for clock in order if clock in found), ())

    @property
    def base_ms(self) -> float | None:
        values = self._times(BASE)
        return summarize(values).median if values else None

    @property
    def predicted_ms(self) -> float | None:
        """As the same share of the base step in these turns: the machine may be slower now."""
        base = self.base_ms
        return None if base is None else base * self.trial.predicted_ms / self.trial.step_ms

    @property
    def predicted_range(self) -> Interval | None:
        """Of a single change, as the same share of the base step; None without a range."""
        predicted, base = self.predicted_ms, self.base_ms
        if predicted is None or base is None or len(self.trial.advice) != 1:
            return None
        (one,) = self.trial.advice
        if one.low_ms is None or one.high_ms is None:
            return None
        scale = base / self.trial.step_ms
        return Interval(value=predicted, low=scale * one.low_ms, high=scale * one.high_ms)

    @property
    def realised_ms(self) -> float | None:
        return None if self.realised is None else self.realised.value

    @property
    def realised(self) -> Interval | None:
        """The gain in milliseconds, with its interval."""
        ratio, base = self.ratio, self.base_ms
        if ratio is None or base is None:
            return None
        value, low, high = (base * (1 - one) for one in (ratio.value, ratio.high, ratio.low))
        return Interval(value=value, low=low, high=high)

    @property
    def without_effect(self) -> str:
        """Why nothing was changed; empty where something was."""
        return self.record.notes.get("without_effect", "")

    @property
    def is_vague(self) -> bool:
        """Chance moves the gain by more than was predicted and found: a prediction is not to be
        corrected by it."""
        predicted, found = self.predicted_ms, self.realised
        if predicted is None or found is None:
            return True
        return (found.high - found.low) / 2 > max(abs(predicted), abs(found.value))

    @property
    def loss_off(self) -> float | None:
        """Between the means of the last quarter of the steps."""
        base, changed = (self.record.find("loss", variant=name) for name in (BASE, CHANGED))
        if base is None or changed is None or self.trial.more_samples != 1:
            return None
        steps = min(len(base.values), len(changed.values))
        last = max(1, steps // 4)
        means = [sum(one.values[steps - last : steps]) / last for one in (base, changed)]
        travelled = abs(base.values[0] - means[0])
        return abs(means[1] - means[0]) / max(travelled, abs(means[0]), 1e-12)

    @property
    def same_loss(self) -> bool:
        return self.loss_off is None or self.loss_off <= LOSS_WITHIN

    @property
    def verdict(self) -> str:
        if self.record.status != "ok" or self.ratio is None:
            return f"not tried: {self.record.reason or self.record.status}"
        if self.without_effect:
            return f"dropped: {self.without_effect}"
        lost = self.record.quantity("loss_lost", variant=CHANGED)
        if lost is not None and self.record.quantity("loss_lost", variant=BASE) is None:
            return f"dropped: the loss is no number from step {lost:.0f} on"
        if not self.same_loss:
            return "dropped: the loss differs"
        if self.ratio.high < 1:
            seen = (
                self.trial.more_samples != 1 or self.record.find("loss", variant=BASE) is not None
            )
            return "kept" if seen else "kept, without a loss to compare"
        return "dropped: slower" if self.ratio.low > 1 else NO_GAIN

    @property
    def kept(self) -> bool:
        return self.verdict.startswith("kept")

    def verified(self) -> Verified | None:
        """For the calibration: single changes only, which were made."""
        if len(self.trial.advice) != 1 or self.without_effect:
            return None
        if self.realised_ms is None or self.predicted_ms is None or self.base_ms is None:
            return None
        return Verified(
            device=self.record.environment.device_name,
            code=self.trial.code,
            predicted_ms=self.predicted_ms,
            realised_ms=self.realised_ms,
            step_ms=self.base_ms,
            when=self.record.started,
            factor=self.trial.advice[0].factor,
        )


def first_right(
    advice: Sequence[Advice], tried: Sequence[Tried], most: int = 3
) -> tuple[int, int]:  # fmt: skip
    """Of the first changes that were advised and tried: how many gained within a third of what was
    predicted, and how many these are. A trial that failed is one that was not right; one that
    changed nothing is none."""
    single = [one for one in tried if len(one.trial.advice) == 1]
    alone = {one.trial.code: one for one in single if not one.without_effect}
    counted = [alone[one.code] for one in advice if one.code in alone][:most]
    right = [one for one in counted if (v := one.verified()) is not None and is_right(v)]
    return len(right), len(counted)


def best_of(tried: Sequence[Tried]) -> Tried | None:
    """Of those that are kept, the one with the fewest changes that none is proven faster than."""
    kept = {one: one.ratio for one in tried if one.kept and one.ratio is not None}
    if not kept:
        return None
    fastest = min(kept.values(), key=lambda ratio: ratio.value)
    as_fast = [one for one, ratio in kept.items() if ratio.value <= fastest.high]
    return min(as_fast, key=lambda one: (len(one.trial.advice), kept[one].value))
