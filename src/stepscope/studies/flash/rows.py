"""Results of the flash study with derived values: grid cells, comparisons and tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from stepscope.analysis.limits import matrix_ceiling, median_ms, share_of
from stepscope.analysis.verdict import Share
from stepscope.records.schema import Series
from stepscope.records.stats import Ratio, Summary, ratio_interval, summarize
from stepscope.studies.attention.workload import RESULTS
from stepscope.studies.base import Result, results_of
from stepscope.studies.flash.cases import (
    AttentionRaceCase,
    FlashCase,
    GridCase,
    Shape,
)

OURS = "triton"
GRADIENTS = RESULTS[1:]
CPU_BOUND_FROM = 0.5
"""A cell is CPU-bound from this ratio of issue time to total time on: a GPU that starts idle waits
for the last launch."""
_FACTORS = {"float32": (2.0, 2.0)}
_SIXTEEN_BIT_FACTORS = (1.0, 1.5)
"""Errors that the policy allows for output and gradients, relative to the reference's error."""


class GridRow(Result[GridCase]):
    """Result of one implementation at one shape."""

    @property
    def attention(self) -> str:
        return self.case.attention

    @property
    def label(self) -> str:
        """Shape and dtype for messages."""
        return f"{self.case.sizes} {self.case.dtype}"

    @cached_property
    def kernels(self) -> Mapping[str, str]:
        """Names of the kernels that ran, by pass."""
        return self.record.attachment("kernels", dict[str, str]) or {}

    @property
    def peak(self) -> float | None:
        return self.record.quantity("peak_bytes")

    @property
    def predicted_saved(self) -> float | None:
        return self.record.quantity("predicted_saved_bytes")

    def time(self, mode: str = "both") -> Summary | None:
        return _summary(self.record.find(mode))

    @property
    def median(self) -> float:
        """Median of both passes in ms; the row must be timed."""
        time = self.time()
        assert time is not None
        return time.median

    def issued_ms(self) -> float | None:
        """CPU time to issue both passes in ms; None where the host clock is the only clock."""
        on_device = self.record.find("both", "device") is not None
        return median_ms(self.record, "both", "host") if on_device else None

    @cached_property
    def is_cpu_bound(self) -> bool:
        """True if the time is that of issuing the launches."""
        issued, time = self.issued_ms(), self.time()
        return bool(issued and time and issued >= CPU_BOUND_FROM * time.median)

    def rate(self, mode: str = "both") -> float | None:
        """FLOP/s at the median time; a causal mask halves the FLOPs."""
        flops = self.record.quantity("flops", phase="" if mode == "both" else mode)
        time = self.time(mode)
        return flops / (time.median * 1e-3) if flops and time and time.median > 0.0 else None

    def share(self) -> Share | None:
        """Rate of both passes over the measured matmul rate of the dtype."""
        return share_of(self.rate() or None, matrix_ceiling(self.record))

    def error_ratio(self, *results: str) -> float | None:
        """The largest of these errors relative to the reference's error."""
        ratios = []
        for name in results:
            error = self.record.quantity("error", variant=name)
            own = self.record.quantity("reference_error", variant=name)
            if error is None or not own:
                return None
            ratios.append(error / own)
        return max(ratios, default=None)

    def allowed_error(self, name: str) -> float:
        """Error allowed by the policy: a multiple of the reference's error plus one ULP."""
        of_output, of_gradients = _FACTORS.get(self.case.dtype, _SIXTEEN_BIT_FACTORS)
        own = self.record.quantity("reference_error", variant=name) or 0.0
        ulp = self.record.quantity("last_place", variant=name) or 0.0
        return (of_output if name == "output" else of_gradients) * own + ulp

    @cached_property
    def misses(self) -> tuple[str, ...]:
        """Results whose error exceeds the policy."""
        return tuple(
            name
            for name in RESULTS
            if (error := self.record.quantity("error", variant=name)) is not None
            and error > self.allowed_error(name)
        )


class AttentionRace(Result[AttentionRaceCase]):
    """Implementations interleaved on the same tensors, by single or by consecutive calls."""

    def times(self, name: str, *, in_a_row: bool = False) -> Summary | None:
        return _summary(self._series(name, in_a_row))

    def median(self, name: str, *, in_a_row: bool = False) -> float | None:
        times = self.times(name, in_a_row=in_a_row)
        return times.median if times else None

    def ratio(self, baseline: str, ours: str = OURS, *, in_a_row: bool = False) -> Ratio | None:
        """Time of the baseline over that of `ours`; above 1 `ours` is faster."""
        own, other = self._series(ours, in_a_row), self._series(baseline, in_a_row)
        if own is None or other is None or not own.values or not other.values:
            return None
        return ratio_interval(own.values, other.values, level=0.95)

    def out(self, name: str) -> str | None:
        """Reason why an implementation did not run."""
        return (self.record.attachment("excluded", dict[str, str]) or {}).get(name)

    def _series(self, name: str, in_a_row: bool) -> Series | None:
        return self.record.find("wall" if in_a_row else "step", variant=name)


def grid_rows(results: Sequence[Result[FlashCase]]) -> list[GridRow]:
    rows = (GridRow(*result) for result in results_of(results, GridCase))
    return sorted(rows, key=lambda row: sort_key(row.case))


def races(results: Sequence[Result[FlashCase]]) -> list[AttentionRace]:
    return [AttentionRace(*result) for result in results_of(results, AttentionRaceCase)]


def sort_key(case: GridCase | Shape) -> tuple[object, ...]:
    return (case.dtype, not case.is_single, case.head, case.seq, case.sizes)


def _summary(series: Series | None) -> Summary | None:
    if series is None or series.unit != "ms" or not series.values:
        return None
    return summarize(series.values)
