"""The trust level of a record, derived from its checks and its samples.

`good`
    Nothing indicates that the times are wrong by more than their confidence intervals.
`noisy`
    The times depend on other work on the machine, or their spread is too large. They are shown,
    but no success, ranking or cause is based on them.
`invalid`
    The record does not measure what its name says. None of its numbers is used.

Most checks (stored as `Record.failed_checks`) map to one level, see `LEVEL_OF`. Four do not:
`wide-spread`, `first-call-inside`, `few-samples` and `clocks-dropped` also fire for a single
outlier, for a warm-up that a study measures on purpose, and on a GPU that always runs at its power
cap. None of
these changes the median much, so the samples decide instead. A record is noisy if both are true:

- half of the 95 % confidence interval of the median is at least `MAX_UNCERTAINTY` of its center;
  with hundreds of samples the interval is narrow even if they are uneven;
- the quartiles are as far apart; a single outlier, which among five samples is an end of the
  interval, does not move them.

`MAX_UNCERTAINTY` is the deviation from which a single sample counts as far from the median
(`stats.FAR_EXTREME`). Below it, comparisons and findings rely on the interval itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from stepscope.records.schema import FailedCheck, Part, Record, Series
from stepscope.records.stats import FAR_EXTREME, summarize

Level = Literal["good", "noisy", "invalid"]

MAX_UNCERTAINTY = FAR_EXTREME
MIN_SPREAD_SAMPLES = 3
"""Minimum number of samples for a statement about their spread."""
SPREAD = "uncertain-median"
"""Code of the reason that comes from the samples instead of a check."""

_ABOUT_FIRST_STEPS = ("warmup",)
"""Studies in which the first samples differ from the later ones by design; only the later half is
used."""
_LEVELS: tuple[Level, ...] = ("good", "noisy", "invalid")

LEVEL_OF: dict[str, Level] = {
    # The work was not done or not waited for: this time is impossible on this device.
    "above-ceiling": "invalid",
    # The time belongs to a kernel other than the one in the case's name.
    "other-kernel": "invalid",
    # Part of the backward pass did not run, so the time is that of a smaller step.
    "no-gradient": "invalid",
    # The same, detected by the ratio of the phases.
    "backward-too-fast": "invalid",
    # A peak that an earlier case left behind.
    "forward-peak-above-step": "invalid",
    # Threads waited for cores: every sample is too long, however even the samples are.
    "busy-machine": "noisy",
    # The samples decide about the next four (see above).
    "wide-spread": "good",
    "first-call-inside": "good",
    "few-samples": "good",
    "clocks-dropped": "good",
    # The full step is timed without marks and remains valid; the check is about the phases.
    "phases-do-not-add-up": "good",
    # Small steps take as long as their kernel launches: a result, not a measurement error.
    "flat-in-size": "good",
}
"""Trust level by code of a check. An unknown code, as from a newer version, gives `noisy`."""

_REASONS = {
    "above-ceiling": "the rate is above the limit of the hardware",
    "other-kernel": "another kernel ran than the one named",
    "no-gradient": "part of the backward pass did not run",
    "backward-too-fast": "the backward pass was too fast to be complete",
    "forward-peak-above-step": "the peak includes memory of an earlier case",
    "busy-machine": "the machine was busy",
    SPREAD: "the samples spread too far",
}


class Trust(Part, frozen=True):
    """Trust in one record. `codes` are the failed checks that determined its level."""

    level: Level = "good"
    codes: tuple[str, ...] = ()
    uncertainty: float = 0.0
    """Relative uncertainty of the case's main time; see the function `uncertainty`."""

    @property
    def good(self) -> bool:
        return self.level == "good"

    @property
    def reason(self) -> str:
        """The first code in a few words; empty if there is none."""
        return reason(self.codes[0]) if self.codes else ""

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key: smaller is better."""
        return _LEVELS.index(self.level), self.uncertainty


def reason(code: str) -> str:
    return _REASONS.get(code, f"the measurement is flagged {code}")


def trust(record: Record, failed_checks: Iterable[FailedCheck] | None = None) -> Trust:
    """Return the trust in a record, based on `failed_checks` or on its stored ones.

    A record that is not `ok` has no time and is good: an out-of-memory is a result.
    """
    if record.status != "ok":
        return Trust()
    codes = dict.fromkeys(
        check.code for check in (record.failed_checks if failed_checks is None else failed_checks)
    )
    levels: dict[str, Level] = {code: LEVEL_OF.get(code, "noisy") for code in codes}
    series = _subject(record)
    unknown = 0.0
    if series is not None:
        late = len(series.values) // 2 if record.study in _ABOUT_FIRST_STEPS else 0
        unknown = uncertainty(series.values[late:])
    if unknown >= MAX_UNCERTAINTY:
        levels[SPREAD] = "noisy"
    level: Level = max(levels.values(), key=_LEVELS.index, default="good")
    if level == "good":
        return Trust(uncertainty=unknown)
    causes = tuple(code for code, code_level in levels.items() if code_level == level)
    return Trust(level=level, codes=causes, uncertainty=unknown)


def _subject(record: Record) -> Series | None:
    """Return the main time of the case; of several sizes or variants, the longest one."""
    first = record.series[0] if record.series else None
    if first is None or first.unit != "ms" or len(first.values) < MIN_SPREAD_SAMPLES:
        return None
    alike = [
        series
        for series in record.series
        if (series.unit, series.clock) == (first.unit, first.clock)
        and len(series.values) >= len(first.values)
    ]
    return max(alike, key=lambda series: summarize(series.values).median)


def uncertainty(values: Sequence[float]) -> float:
    """Relative uncertainty of the median: half of its confidence interval, or the interquartile
    range if a single outlier makes the interval wide.

    Each is relative to its own middle. Relative to the median, bimodal samples whose median is one
    of the slow ones would never be far apart.
    """
    summary = summarize(values)
    if not summary.minimum > 0.0:
        return 0.0
    interval = (summary.high - summary.low) / (summary.high + summary.low)
    return min(interval, 2.0 * summary.iqr / (summary.q1 + summary.q3))
