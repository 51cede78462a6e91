"""The model of gradient buckets, s/(w·n) + n·o, fitted to the communication of a case.

s bytes of gradients in n buckets: the last bucket has nothing to overlap with, and every collective
has an overhead o. o and the bandwidth w come from the reductions alone, timed without overlap,
which take s/w + n·o.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite, sqrt
from typing import NamedTuple

from stepscope.analysis.conclusions import NOTHING, conclude
from stepscope.analysis.effects import Effect, level
from stepscope.analysis.links import fit_link
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Cell, Curve, Figure, Finding, Interval
from stepscope.report.format import bytes_, duration, percent, rate
from stepscope.report.tables import col, interval, table
from stepscope.studies.ddp.results import DDPResult
from stepscope.views.builders import curve, suffix

GOOD_FIT = 0.25
"""Largest accepted relative distance of a measured time from the fit."""
_CURVE_POINTS = 40


class Buckets(NamedTuple):
    """A strategy with so many reductions."""

    strategy: str
    reductions: int


class BucketModel(NamedTuple):
    """The fit; every round of samples gives one, and the intervals are those of their median."""

    gradient_bytes: float
    overhead_ms: Effect
    bytes_per_ms: Effect
    best_bytes: Effect
    """Size of a bucket with the least added time, sqrt(s·w·o); at most all gradients."""
    residual: float
    """Largest relative distance of a measured communication from the fit."""

    @property
    def is_good(self) -> bool:
        shown = self.overhead_ms.above and self.bytes_per_ms.above
        return shown and self.residual <= GOOD_FIT

    def communication_ms(self, count: int) -> float:
        return self.gradient_bytes / self.bytes_per_ms.value + count * self.overhead_ms.value

    def added_ms(self, bucket_bytes: float) -> float:
        """Time after the backward pass with buckets of that size."""
        count = self.gradient_bytes / bucket_bytes
        return bucket_bytes / self.bytes_per_ms.value + count * self.overhead_ms.value

    @property
    def best_ms(self) -> float:
        return self.added_ms(self.best_bytes.value)


def bucketings(timed: DDPResult) -> list[Buckets]:
    """Strategies whose reductions are in flight together, by their number. `naive` waits for each
    before the next one."""
    known = [
        Buckets(name, int(count))
        for name in timed.names
        if name != "naive"
        and (count := timed.record.quantity("reductions", variant=name))
        and timed.samples("communication", name)
    ]
    return sorted(known, key=lambda one: one.reductions)


def bucket_model(timed: DDPResult) -> BucketModel | None:
    """Fit the model; None with one rank, without several bucket sizes, or if time does not rise
    with the number of collectives in most rounds."""
    size, known = timed.record.quantity("gradient_bytes"), bucketings(timed)
    if timed.case.ranks == 1 or not size or len({one.reductions for one in known}) < 2:
        return None
    samples = [timed.samples("communication", one.strategy) for one in known]
    rounds = list(zip(*samples, strict=False))
    fits = [_fit(size, known, times) for times in rounds]
    overheads = [overhead for overhead, _ in fits]
    rates = [per_ms for _, per_ms in fits if per_ms > 0]
    if len(rates) < len(fits) or not fits:
        return None
    best = [min(size, sqrt(size * per_ms * overhead)) for overhead, per_ms in fits]
    model = BucketModel(
        size,
        level(summarize(overheads)),
        level(summarize(rates)),
        level(summarize(best)),
        residual=0.0,
    )
    off = (
        abs(model.communication_ms(one.reductions) / summarize(times).median - 1)
        for one, times in zip(known, samples, strict=True)
    )
    return model._replace(residual=max(off))


def _fit(size: float, known: Sequence[Buckets], times: Sequence[float]) -> tuple[float, float]:
    """Overhead in ms and bytes per ms; (0, 0) if the times do not fit a line that rises."""
    each = [ms / one.reductions for ms, one in zip(times, known, strict=True)]
    link = fit_link([size / one.reductions for one in known], each)
    return (link.latency_ms, link.bytes_per_ms) if link else (0.0, 0.0)


def bucket_blocks(done: Sequence[DDPResult]) -> Iterator[Block]:
    fitted = [(timed, model) for timed in done if (model := bucket_model(timed)) is not None]
    for timed, model in fitted:
        yield _finding(timed, model)
    for index, (timed, model) in enumerate(fitted):
        yield _figure(timed, model, suffix(index))
    if fitted:
        yield table(
            "ddp-buckets",
            "Gradient buckets: model and measurement",
            [(timed, model, one) for timed, model in fitted for one in bucketings(timed)],
            [
                col("case", lambda r: r[0].title),
                col("strategy", lambda r: r[2].strategy),
                col("collectives", lambda r: r[2].reductions, "count", hint="n"),
                col("bucket", lambda r: r[1].gradient_bytes / r[2].reductions, "bytes", hint="s/n"),
                col(
                    "communication",
                    lambda r: interval(r[0].summary("communication", r[2].strategy)),
                    unit="ms",
                    hint="its reductions without overlap",
                ),
                col(
                    "fit",
                    lambda r: r[1].communication_ms(r[2].reductions),
                    unit="ms",
                    hint="s/w + n·o",
                ),
                col(
                    "exposed",
                    lambda r: _exposed_cell(r[0].exposed(r[2].strategy)),
                    unit="ms",
                    hint="step minus the step without communication",
                ),
                col(
                    "model",
                    lambda r: r[1].added_ms(r[1].gradient_bytes / r[2].reductions),
                    unit="ms",
                    hint="s/(w·n) + n·o",
                ),
            ],
            caption="o and w are fitted to the communication alone; the model of the exposed time"
            " uses no step. It assumes that a reduction does not slow down the backward pass, as it"
            " does where both share cores.",
        )


def _finding(timed: DDPResult, model: BucketModel) -> Finding:
    measured = {
        one: exposed for one in bucketings(timed) if (exposed := timed.exposed(one.strategy))
    }
    overhead, per_ms, best = model.overhead_ms, model.bytes_per_ms, model.best_bytes
    least = min(measured, key=lambda one: measured[one].value, default=None)
    seen = ""
    if least is not None:
        lowest = duration(measured[least].value)
        seen = f" The lowest median of the exposed time is {lowest} ({least.strategy})."
    conclusion = NOTHING
    if model.is_good:
        whole = best.value >= model.gradient_bytes
        size = "a single bucket" if whole else f"buckets of {bytes_(best.value)}"
        ends = f" [{bytes_(best.low)}, {bytes_(best.high)}]" * (not whole)
        conclusion = conclude(
            f"By s/(w·n) + n·o {size}{ends} add the least time, {duration(model.best_ms)}.",
            overhead,
            per_ms,
        )
    text = (
        f"a collective has an overhead of {duration(overhead.value)}{_ends(overhead, duration)} and"
        f" {rate(per_ms.value * 1e3, 'B/s')}{_ends(per_ms.times(1e3), _bytes_per_s)}, fitted to the"
        f" reductions of {bytes_(model.gradient_bytes)} without overlap"
    )
    if model.residual > GOOD_FIT:
        text = (
            f"the time of the reductions does not fit s/w + n·o, off by up to"
            f" {percent(model.residual)}"
        )
    elif not model.is_good:
        text = (
            "the time of the reductions does not show an overhead per collective:"
            f" {duration(overhead.value)}{_ends(overhead, duration)}"
        )
    return timed.finding(
        "buckets",
        f"{text}.{seen}",
        {
            "gradient_bytes": model.gradient_bytes,
            "overhead_ms": overhead.value,
            "overhead_low_ms": overhead.low,
            "overhead_high_ms": overhead.high,
            "bytes_per_s": per_ms.value * 1e3,
            "bytes_per_s_low": per_ms.low * 1e3,
            "bytes_per_s_high": per_ms.high * 1e3,
            "best_bytes": best.value if model.is_good else None,
            "best_bytes_low": best.low if model.is_good else None,
            "best_bytes_high": best.high if model.is_good else None,
            "best_added_ms": model.best_ms if model.is_good else None,
            "residual": model.residual,
            "least_exposed": least.strategy if least else None,
        },
        conclusion=conclusion,
        tone="info" if model.is_good else "warn",
    )


def _exposed_cell(exposed: Effect | None) -> Cell:
    if exposed is None or not isfinite(exposed.low + exposed.high):
        return exposed.value if exposed else None
    return Interval(value=exposed.value, low=exposed.low, high=exposed.high)


def _ends(effect: Effect, words: Callable[[float], str]) -> str:
    """The interval, if there are enough samples for one."""
    if not isfinite(effect.low + effect.high):
        return ""
    return f" [{words(effect.low)}, {words(effect.high)}]"


def _bytes_per_s(value: float) -> str:
    return rate(value, "B/s")


def _figure(timed: DDPResult, model: BucketModel, end: str) -> Figure:
    known = bucketings(timed)
    measured = [
        (model.gradient_bytes / one.reductions, exposed)
        for one in reversed(known)
        if (exposed := timed.exposed(one.strategy))
    ]
    least = model.gradient_bytes / max(one.reductions for one in known)
    steps = (model.gradient_bytes / least) ** (1 / _CURVE_POINTS)
    sizes = [least * steps**n for n in range(_CURVE_POINTS + 1)]
    return Figure(
        name=f"ddp-buckets-{timed.record.case}{end}",
        title=f"Size of a bucket: {timed.title}",
        curves=(
            curve("s/(w·n) + n·o", [(size, model.added_ms(size)) for size in sizes]),
            Curve(
                label="measured",
                x=tuple(size for size, _ in measured),
                y=tuple(exposed.value for _, exposed in measured),
                low=tuple(max(0.0, exposed.low) for _, exposed in measured),
                high=tuple(exposed.high for _, exposed in measured),
            ),
        ),
        x_label="size of a bucket",
        y_label="exposed, ms",
        x_log=True,
        x_bytes=True,
        caption="Exposed communication by the mean size of a bucket. The curve is fitted to the"
        " reductions without overlap, not to the steps."
        + ("" if model.is_good else " The fit is poor."),
    )
