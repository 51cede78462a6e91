"""What a record achieved, and how far that is from what its machine allows.

Nothing here guesses: where a record lacks what a number needs, the answer is None.
"""

from __future__ import annotations

from stepscope.errors import UsageError
from stepscope.model.config import precision
from stepscope.records.schema import Ceiling, Clock, Part, Record
from stepscope.records.stats import Summary, summarize

HOST_BOUND_FROM = 0.9
"""Share of the step that the host spends issuing it, from which the device waits for the host."""


class HostShare(Part, frozen=True):
    """How much of a step passed before the host had issued all of it."""

    fraction: float
    bound: bool


def median_ms(record: Record, name: str, clock: Clock | None = None) -> float | None:
    """Median of a time series, on that clock or on the device's where there is one."""
    series = record.find(name, clock)
    if series is None or series.unit != "ms" or not series.values:
        return None
    return summarize(series.values).median


def step_ms(record: Record) -> Summary | None:
    """The whole step, by the device's clock where there is one.

    The device's clock runs from the first kernel to the last. The host's adds what it takes to
    notice the end, which is not part of the step when steps follow each other.
    """
    series = record.find("step")
    if series is None or series.unit != "ms" or not series.values:
        return None
    return summarize(series.values)


def achieved_flops(record: Record) -> float | None:
    """Model FLOPs per second of the median step."""
    return _per_second(record, "flops")


def tokens_per_second(record: Record) -> float | None:
    return _per_second(record, "tokens")


def matrix_ceiling(record: Record, measured: bool = True) -> Ceiling | None:
    """The matrix rate of the format this record's products ran in: measured, or the sheet's."""
    try:
        compute = precision(str(record.config["dtype"])).compute
    except (KeyError, UsageError):
        return None
    return record.ceiling(f"matmul.{compute}", measured=measured)


def mfu(record: Record, measured: bool = True) -> float | None:
    """Model FLOPs utilisation: the achieved rate as a share of the matrix ceiling."""
    rate, ceiling = achieved_flops(record), matrix_ceiling(record, measured)
    if rate is None or ceiling is None or ceiling.value <= 0.0:
        return None
    return rate / ceiling.value


def host_bound(record: Record) -> HostShare | None:
    """Whether the device waited for the host. On a CPU there is no queue, so no answer."""
    issue, step = median_ms(record, "issue", "host"), median_ms(record, "step", "host")
    if record.environment.device_kind == "cpu" or issue is None or not step:
        return None
    fraction = issue / step
    return HostShare(fraction=fraction, bound=fraction >= HOST_BOUND_FROM)


def _per_second(record: Record, name: str) -> float | None:
    amount, step = record.quantity(name), step_ms(record)
    if amount is None or step is None or step.median <= 0.0:
        return None
    return amount / (step.median * 1e-3)
