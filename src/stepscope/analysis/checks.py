"""Checks of records against physics. Each message says what is wrong and what to do.

A check is a function that returns its message, or None; its decorator gives it a code. Checks that
need several records are in `group_checks`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from stepscope.analysis.group_checks import GROUP_CHECKS, check_group
from stepscope.analysis.kernels.expected import foreign_kernels
from stepscope.analysis.limits import PHASES, achieved_flops, matmul_ceiling, median_ms, phase_sums
from stepscope.records.schema import FailedCheck, Reading, Record, Series
from stepscope.records.stats import (
    FAR_EXTREME,
    MIN_SAMPLES,
    WIDE_STD,
    even_spacing,
    far_above,
    judge,
    summarize,
)

__all__ = ["check_group", "check_record", "codes"]

Check = Callable[[Record], str | None]

ABOVE_MEASURED = 1.05
"""Tolerance of a measured ceiling, which has noise itself; a data sheet needs none."""
FIRST_ABOVE_REST = 1.5
CLOCK_DROP = 0.10
BUSY, WAITED = "busy-machine", 0.10
"""Seconds per second that threads wait for a core."""
BACKWARD_OVER_FORWARD = 0.5
PHASES_OFF = 0.05
CHOSEN_CLOCKS = frozenset({"none", "idle", "application-clocks", "display-clocks"})
"""Throttle reasons that do not mean the device was slowed down while it worked."""

_CHECKS: dict[str, Check] = {}


def check_record(record: Record) -> tuple[FailedCheck, ...]:
    """Return the failed checks of one record. A record that is not `ok` has no results to check."""
    if record.status != "ok":
        return ()
    complaints = ((code, _complaint(check, record)) for code, check in _CHECKS.items())
    return tuple(FailedCheck(code=code, message=message) for code, message in complaints if message)


def _complaint(check: Check, record: Record) -> str | None:
    """Return a check's message. Samples that break its arithmetic are reported as a failed check,
    so that a record that was just measured is never lost."""
    try:
        return check(record)
    except (ArithmeticError, ValueError) as error:
        return f"the samples are outside the range that can be checked: {error}"


def codes() -> tuple[str, ...]:
    """Return the codes of all checks, those of several records last."""
    return (*_CHECKS, *GROUP_CHECKS)


def _check(code: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        _CHECKS[code] = check
        return check

    return register


@_check("above-ceiling")
def _above_ceiling(record: Record) -> str | None:
    for measured, allowed in ((True, ABOVE_MEASURED), (False, 1.0)):
        rate, ceiling = achieved_flops(record), matmul_ceiling(record, measured)
        if ceiling is not None and ceiling.doubt:
            # The ceiling may be too low; a rate above it says nothing about the step.
            continue
        if rate and ceiling and ceiling.value > 0.0 and rate > allowed * ceiling.value:
            share = rate / ceiling.value
            whose = "measured" if measured else ceiling.source
            return (
                f"{rate / 1e12:.4g} TFLOP/s is {share:.0%} of the {whose} ceiling {ceiling.name}"
                f" ({ceiling.value / 1e12:.4g} TFLOP/s): work was skipped, the FLOPs are counted"
                " wrong, or the samples end before the device does; check that the step"
                " synchronizes"
            )
    return None


_NOT_ABOUT_TIME = ("memory",)
_FIRST_STEP = "first"
"""A first step happens only once."""


@_check("few-samples")
def _few_samples(record: Record) -> str | None:
    series = _timed(record)
    if series is None or len(series.values) >= MIN_SAMPLES or series.name == _FIRST_STEP:
        return None
    if record.study in _NOT_ABOUT_TIME:
        return None
    return (
        f"{series.label} has {len(series.values)} samples, and a spread needs {MIN_SAMPLES};"
        " measure more steps"
    )


@_check("wide-spread")
def _wide_spread(record: Record) -> str | None:
    series = _timed(record)
    if series is None or len(series.values) < MIN_SAMPLES:
        return None
    # A first call has its own check and says nothing about the other samples.
    values = series.values[1:] if _first_call_inside(record) else series.values
    summary = summarize(values)
    spread = summary.std / summary.mean if summary.mean else 0.0
    farthest = max(summary.minimum, summary.maximum, key=lambda v: abs(v - summary.median))
    off = abs(farthest - summary.median) / summary.median if summary.median else 0.0
    if spread < WIDE_STD and off < FAR_EXTREME:
        return None
    far = far_above(values)
    every = even_spacing(far, len(values))
    if every is not None and every > 1:
        longer = summarize([values[index] for index in far]).median
        return (
            f"one in {every} samples of {series.label} takes {longer:.4g} ms, the others"
            f" {summary.median:.4g} ms: something happens every {every} steps, such as a checkpoint"
        )
    return (
        f"{series.label} spreads by {spread:.0%} of its mean, with a sample {off:.0%} off the"
        f" median of {summary.median:.4g} ms; stop other work on this machine and measure again"
    )


@_check("first-call-inside")
def _first_call_inside(record: Record) -> str | None:
    series = _timed(record)
    if series is None or len(series.values) < MIN_SAMPLES:
        return None
    first, rest = series.values[0], summarize(series.values[1:])
    if first <= FIRST_ABOVE_REST * max(rest.median, rest.q3 + 3 * rest.iqr):
        return None
    return (
        f"the first sample of {series.label} took {first:.4g} ms, the others {rest.median:.4g} ms:"
        " a first call or a compilation is inside the samples; use more warm-up steps"
    )


@_check("clocks-dropped")
def _clocks_dropped(record: Record) -> str | None:
    drop = _largest_clock_drop(record.readings)
    reasons = sorted({r for reading in record.readings for r in reading.throttle} - CHOSEN_CLOCKS)
    if drop is None and not reasons:
        return None
    fell = f"the SM clock fell from {drop[0]:.0f} to {drop[1]:.0f} MHz" if drop else ""
    throttled = f"the device was throttled by {', '.join(reasons)}" if reasons else ""
    return (
        f"{' and '.join(filter(None, (fell, throttled)))}: the samples mix several clock speeds;"
        " cool the device, lock its clocks lower, or raise its power limit, and measure again"
    )


@_check(BUSY)
def _busy_machine(record: Record) -> str | None:
    waits = [(r.at_s, r.waited_s) for r in record.readings if r.waited_s is not None]
    # A later process counts from zero again.
    waited = sum(max(0.0, after - before) for (_, before), (_, after) in pairwise(waits))
    elapsed = waits[-1][0] - waits[0][0] if waits else 0.0
    if elapsed <= 0.0 or waited < WAITED * elapsed:
        return None
    return (
        f"in {elapsed:.3g} s threads of this process waited {waited:.3g} s for a core: other work"
        " uses it, or there are more threads than cores, and all times are too long; stop that work"
        " and measure again"
    )


@_check("backward-too-fast")
def _backward_too_fast(record: Record) -> str | None:
    forward, backward = record.find("forward"), record.find("backward")
    if record.config.get("loss") == "fused":
        # A fused loss computes its gradients in the forward pass.
        return None
    if forward is None or backward is None or forward.clock != backward.clock:
        return None
    forward_ms, backward_ms = median_ms(record, "forward"), median_ms(record, "backward")
    if not forward_ms or backward_ms is None or backward_ms > BACKWARD_OVER_FORWARD * forward_ms:
        return None
    return (
        f"backward took {backward_ms:.4g} ms and forward {forward_ms:.4g} ms, where about twice"
        " forward is expected: gradients do not reach the full model; check for detached tensors"
        " and frozen parameters"
    )


@_check("no-gradient")
def _no_gradient(record: Record) -> str | None:
    missing = record.quantity("gradients_missing")
    if not missing:
        return None
    return (
        f"{missing:.0f} parameters got no gradient: part of the backward pass did not run, so its"
        " time is too short; check that every parameter takes part in the loss"
    )


@_check("phases-do-not-add-up")
def _phases_do_not_add_up(record: Record) -> str | None:
    step = record.find("step")
    if step is None:
        return None
    step_time, sums = median_ms(record, "step", step.clock), phase_sums(record)
    if not step_time or not sums:
        return None
    total = summarize(sums).median
    # Noisy steps differ from each other as well: only a significant difference counts.
    if abs(total / step_time - 1.0) <= PHASES_OFF or not judge(step.values, sums).differs:
        return None
    phases = [name for name in PHASES if record.find(name, step.clock)]
    return (
        f"{' + '.join(phases)} take {total:.4g} ms and the full step {step_time:.4g} ms: marking"
        " the phases changes the step, or a phase is missing; trust the full step"
    )


@_check("other-kernel")
def _other_kernel(record: Record) -> str | None:
    foreign = foreign_kernels(record)
    return f"{foreign}: the time does not belong to what the record names" if foreign else None


def _timed(record: Record) -> Series | None:
    """The main series of the case, if it is a time; other series may legitimately be constant."""
    if not record.series or not record.series[0].values or record.series[0].unit != "ms":
        return None
    return record.series[0]


def _largest_clock_drop(readings: tuple[Reading, ...]) -> tuple[float, float] | None:
    """The highest clock and the lowest after it, if that is much lower.

    An idle device lowers its clock by itself and takes a moment to raise it again.
    """
    clocks = [r.sm_clock_mhz for r in readings if r.sm_clock_mhz and "idle" not in r.throttle]
    worst: tuple[float, float] | None = None
    highest = 0.0
    for before, after in pairwise(clocks):
        highest = max(highest, before)
        if after < (1.0 - CLOCK_DROP) * highest and (worst is None or after < worst[1]):
            worst = (highest, after)
    return worst
