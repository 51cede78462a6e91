"""Achieved rates of a record, compared with the ceilings of its machine.

Nothing is guessed: if a record lacks an input, the result is None.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median

import msgspec

from stepscope.analysis.effects import Effect, level
from stepscope.analysis.ideal import Rates
from stepscope.analysis.verdict import Limit, Share, at_most
from stepscope.errors import UsageError
from stepscope.model.config import precision
from stepscope.records.schema import Ceiling, Clock, Part, Record, Series
from stepscope.records.stats import Summary, summarize

ADAMW_BYTES = 28
"""Bytes that AdamW moves per float32 parameter: read weight, gradient and moments, write three."""
PHASES = ("forward", "loss", "backward", "optimizer")

EMPTY_QUEUE = 0.02
"""Queued work at the end of a phase, as a share of the time so far, below which the queue counts as
empty."""
LAST_KERNEL, LAST_KERNEL_MS = 0.05, 2.0
"""Alternative thresholds, as a share and in ms; both must hold: a phase may end with one long
kernel."""
HOST_BOUND_FROM = 0.5

_FASTER_DTYPES = {"float32": ("tf32", "bfloat16"), "tf32": ("bfloat16",)}
"""The dtypes that a known change could give the matmuls of a step."""
_SPLIT_KERNEL = "split_kernel"
_SPLIT_MATMULS = 6


class HostShare(Part, frozen=True):
    """Share of a step that the device spent in phases limited by their launches."""

    fraction: float
    bound: bool
    phases: tuple[str, ...]
    effect: Effect
    """The fraction against the one from which a step is CPU-bound. Its interval has the fractions
    for either end of the interval of the queued work."""


def median_ms(
    record: Record, name: str, clock: Clock | None = None, *, variant: str = ""
) -> float | None:
    """Median of a time series, on this clock or else on the device's if there is one."""
    series = record.find(name, clock, variant=variant)
    if series is None or series.unit != "ms" or not series.values:
        return None
    return summarize(series.values).median


def step_ms(record: Record) -> Summary | None:
    """Time of the step, or of an attention's forward and backward, on the device's clock if any.

    The device's clock runs from the first kernel to the last. The CPU clock adds the time to
    notice the end, which is not part of the step when steps follow each other.
    """
    series = record.find("step") or record.find("both")
    if series is None or series.unit != "ms" or not series.values:
        return None
    return summarize(series.values)


def achieved_flops(record: Record) -> float | None:
    """Model FLOPs per second of the median step."""
    return _per_second(record, "flops")


def tokens_per_second(record: Record) -> float | None:
    return _per_second(record, "tokens")


def matrix_ceiling(record: Record, measured: bool = True) -> Ceiling | None:
    """Matmul rate of this record's compute dtype, or of its FP8 layers: measured, or from the data
    sheet."""
    try:
        policy = precision(str(record.config.get("dtype")))
    except UsageError:
        return None
    return record.ceiling(f"matmul.{policy.fastest}", measured=measured)


def step_rates(record: Record, dtype: str, *, fp8: bool) -> Rates | None:
    """Measured rates of a step's matmuls in that dtype, with the eligible ones in FP8 if asked for
    and if the machine has it; None without a measured rate or bandwidth."""
    matmul, bandwidth, narrow = (
        record.ceiling(name) for name in (f"matmul.{dtype}", "memory.copy", "matmul.fp8")
    )
    if matmul is None or bandwidth is None or matmul.value <= 0 or bandwidth.value <= 0:
        return None
    in_fp8 = fp8 and narrow is not None and narrow.value > 0
    return Rates(matmul.value, bandwidth.value, narrow.value if in_fp8 and narrow else None)


def rates_doubt(record: Record, dtype: str, *, fp8: bool) -> str:
    """Return why one of the rates of `step_rates` may be too low; empty if none is doubtful."""
    names = (f"matmul.{dtype}", "memory.copy", *(("matmul.fp8",) if fp8 else ()))
    return doubt_of(*(record.ceiling(name) for name in names))


def measured_ceilings(record: Record) -> dict[str, Ceiling]:
    """Return the measured ceilings of a record by name, with their doubts."""
    names = [one.name for one in record.ceilings if one.source == "measured"]
    return {name: ceiling for name in names if (ceiling := record.ceiling(name)) is not None}


def doubt_of(*ceilings: Ceiling | None) -> str:
    """Return the first doubt about these ceilings; empty if all are reliable."""
    return next((one.doubt for one in ceilings if one is not None and one.doubt), "")


def matmul_ceiling(record: Record, measured: bool = True) -> Ceiling | None:
    """Ceiling of the record's matmul rate: that of its dtype, unless its kernels use another.

    Kernels that split float32 into bfloat16 parts compute each matmul as six bfloat16 matmuls, on
    tensor cores that float32 itself does not use.
    """
    kernels = record.attachment("kernels", dict[str, str]) or {}
    split = any(_SPLIT_KERNEL in names for names in kernels.values())
    narrow = record.ceiling("matmul.bfloat16", measured=measured) if split else None
    if narrow is None:
        return matrix_ceiling(record, measured)
    return msgspec.structs.replace(
        narrow, name="six bfloat16 matmuls", value=narrow.value / _SPLIT_MATMULS
    )


def mfu(record: Record, measured: bool = True) -> Share | None:
    """Model FLOPs utilization: the achieved rate as a share of the matmul ceiling. It is an upper
    bound if that ceiling is doubtful."""
    return share_of(achieved_flops(record), matrix_ceiling(record, measured))


def share_of(rate: float | None, ceiling: Ceiling | None) -> Share | None:
    """A rate as a share of a ceiling, an upper bound if the ceiling is doubtful; None if it exceeds
    a doubtful one, which then says nothing."""
    if rate is None or ceiling is None or ceiling.value <= 0.0:
        return None
    share = rate / ceiling.value
    return None if ceiling.doubt and share > 1.0 else at_most(share, ceiling.doubt)


def fastest_dtype(dtype: str, rates: Mapping[str, float], lacks: Collection[str] = ()) -> str:
    """The dtype with the highest measured matmul rate among those that a change could apply."""
    candidates = (
        dtype,
        *(candidate for candidate in _FASTER_DTYPES.get(dtype, ()) if candidate not in lacks),
    )
    return max(candidates, key=lambda candidate: rates.get(candidate, 0.0))


def hardware_limit(
    flops: float,
    parameters: int,
    dtype: str,
    rates: Mapping[str, float],
    bandwidth: float | None,
    lacks: Collection[str] = (),
    doubts: Mapping[str, str] | None = None,
) -> Limit | None:
    """All matmuls at the measured rate of the fastest dtype, and the bytes of the update moved
    once; None without FLOPs or a rate. `doubts` are those of ceilings, by name."""
    best = fastest_dtype(dtype, rates, lacks)
    rate = rates.get(best, 0.0)
    if flops <= 0 or rate <= 0:
        return None
    update = 1e3 * parameters * ADAMW_BYTES / bandwidth if bandwidth else 0.0
    used = (f"matmul.{best}", *(("memory.copy",) if update else ()))
    doubt = next(filter(None, map((doubts or {}).get, used)), "")
    return Limit(matmul_ms=1e3 * flops / rate, update_ms=update, dtype=best, doubt=doubt)


def phase_sums(record: Record) -> tuple[float, ...]:
    """Sum of the phases of each marked step, on the clock of the full step."""
    step = record.find("step")
    if step is None:
        return ()
    phases = [series for name in PHASES if (series := record.find(name, step.clock)) is not None]
    return tuple(sum(parts) for parts in zip(*(series.values for series in phases), strict=False))


def host_bound(record: Record, variant: str = "") -> HostShare | None:
    """Determine how much of a step the GPU waited for the CPU, for one variant of it.

    On a CPU there is no launch queue and the result is None. A sample starts with CPU and GPU
    idle, so the GPU's delay behind the CPU at the end of a phase is queued work. A phase that
    ends with an empty queue was only as fast as the CPU launched it. The CPU's own time says
    little, because a full queue also blocks the CPU.
    """

    def find(name: str, clock: Clock) -> Series | None:
        return record.find(name, clock, variant=variant)

    pairs = [
        (name, on_device.values, on_host.values)
        for name in PHASES
        if (on_device := find(name, "device")) and (on_host := find(name, "host"))
    ]
    if not pairs:
        step, issue = find("step", "device"), find("issue", "host")
        if step is None or issue is None:
            return None
        pairs = [("step", step.values, issue.values)]
    so_far = [0.0] * min(len(values) for _, values, _ in pairs)
    lag = so_far
    if not so_far:
        return None
    total, starved, at_least, at_most = 0.0, {}, 0.0, 0.0
    for name, on_device_ms, on_host_ms in pairs:
        so_far = [before + spent for before, spent in zip(so_far, on_device_ms, strict=False)]
        lag = [
            before + spent - issued
            for before, spent, issued in zip(lag, on_device_ms, on_host_ms, strict=False)
        ]
        spent = median(on_device_ms)
        total += spent
        passed = median(so_far)
        empty = max(EMPTY_QUEUE * passed, min(LAST_KERNEL * passed, LAST_KERNEL_MS))
        queued = level(summarize(lag), neutral=empty)
        if queued.value <= empty:
            starved[name] = spent
        at_least += spent * (queued.high <= empty)
        at_most += spent * (queued.low <= empty)
    if not total:
        return None
    fraction = sum(starved.values()) / total
    return HostShare(
        fraction=fraction,
        bound=fraction >= HOST_BOUND_FROM,
        phases=tuple(starved),
        effect=Effect(fraction, at_least / total, at_most / total, neutral=HOST_BOUND_FROM),
    )


def _per_second(record: Record, name: str) -> float | None:
    amount, step = record.quantity(name), step_ms(record)
    if amount is None or step is None or step.median <= 0.0:
        return None
    return amount / (step.median * 1e-3)
