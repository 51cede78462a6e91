"""Whether a record's times may carry a conclusion: the one verdict drawn from all of its lints.

`good`
    Nothing says that the times are wrong by more than their own intervals.
`noisy`
    Other work or the spread of the samples decides the times as much as the case does. The
    numbers are shown; no success, ranking or cause may rest on them.
`invalid`
    What was timed is not what the record names. No number of it counts.

A lint alone is too coarse for the spread: `wide-spread`, `first-call-inside`, `few-samples` and
`clocks-dropped` fire on one far sample, on a warm-up that is the subject of the study, and on the
power cap at which a GPU runs all day. None of them moves a median much. So the samples decide about
those four: the record is noisy where the 95 % interval of the median reaches `MEDIAN_KNOWN_TO` of
its middle to either side and the quartiles lie as far apart. The interval shrinks with the number
of samples, so hundreds of uneven samples still give a good median; the quartiles ignore one far
sample, which in a case of five is an end of the interval. The bound is the distance at which a
single sample counts as far (`stats.FAR_EXTREME`): below it, comparisons and findings have the
interval itself to go by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from stepscope.records.schema import Lint, Part, Record, Series
from stepscope.records.stats import FAR_EXTREME, summarize

Level = Literal["good", "noisy", "invalid"]

MEDIAN_KNOWN_TO = FAR_EXTREME
FEWEST = 3
"""Samples whose distances say anything about the next one."""
SPREAD = "uncertain-median"
"""The reason that comes from the samples instead of a lint."""

_ABOUT_FIRST_STEPS = ("warmup",)
"""Studies in which the first samples differ from the later ones by design; the later ones count."""
_LEVELS: tuple[Level, ...] = ("good", "noisy", "invalid")

LEVEL_OF: dict[str, Level] = {
    # The work was not done or not waited for: no such time exists on this device.
    "above-ceiling": "invalid",
    # The time belongs to a kernel other than the one in the case's name.
    "other-kernel": "invalid",
    # Part of the backward pass did not run, so the time is that of a smaller step.
    "no-gradient": "invalid",
    # The same, seen by the ratio of the phases.
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
    # The whole step is timed without marks and stands; the phases carry the complaint.
    "phases-do-not-add-up": "good",
    # Small steps are as long as their launches: a result, not an error of measurement.
    "flat-in-size": "good",
}
"""The level each lint gives. A code that is not here, as from a newer version, gives `noisy`."""

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
    """The verdict on one record. `codes` are the complaints that gave its level."""

    level: Level = "good"
    codes: tuple[str, ...] = ()
    uncertainty: float = 0.0
    """Of the time that the case is about; see the function of that name."""

    @property
    def good(self) -> bool:
        return self.level == "good"

    @property
    def reason(self) -> str:
        """The first complaint in a few words; empty where there is none."""
        return reason(self.codes[0]) if self.codes else ""

    @property
    def rank(self) -> tuple[int, float]:
        """Smaller is better."""
        return _LEVELS.index(self.level), self.uncertainty


def reason(code: str) -> str:
    return _REASONS.get(code, f"the measurement is flagged {code}")


def trust(record: Record, lints: Iterable[Lint] | None = None) -> Trust:
    """The trust in a record, by these lints or by those it was stored with.

    A record that is not `ok` claims no time and is good: an out-of-memory is a result.
    """
    if record.status != "ok":
        return Trust()
    codes = dict.fromkeys(lint.code for lint in (record.lints if lints is None else lints))
    given: dict[str, Level] = {code: LEVEL_OF.get(code, "noisy") for code in codes}
    series = _subject(record)
    unknown = 0.0
    if series is not None:
        late = len(series.values) // 2 if record.study in _ABOUT_FIRST_STEPS else 0
        unknown = uncertainty(series.values[late:])
    if unknown >= MEDIAN_KNOWN_TO:
        given[SPREAD] = "noisy"
    level: Level = max(given.values(), key=_LEVELS.index, default="good")
    if level == "good":
        return Trust(uncertainty=unknown)
    blamed = tuple(code for code, one in given.items() if one == level)
    return Trust(level=level, codes=blamed, uncertainty=unknown)


def _subject(record: Record) -> Series | None:
    """The time that the case is about: of a sweep over sizes or of a race, the longest one."""
    first = record.series[0] if record.series else None
    if first is None or first.unit != "ms" or len(first.values) < FEWEST:
        return None
    alike = [
        series
        for series in record.series
        if (series.unit, series.clock) == (first.unit, first.clock)
        and len(series.values) >= len(first.values)
    ]
    return max(alike, key=lambda series: summarize(series.values).median)


def uncertainty(values: Sequence[float]) -> float:
    """How far the median of samples may be off, as a share of it: half of its interval, or the
    distance of the quartiles where one far sample makes the interval wide.

    Each is relative to its own middle. Relative to the median, samples of two speeds whose median
    is one of the slow ones would never be far apart.
    """
    summary = summarize(values)
    if not summary.minimum > 0.0:
        return 0.0
    interval = (summary.high - summary.low) / (summary.high + summary.low)
    return min(interval, 2.0 * summary.iqr / (summary.q1 + summary.q3))
