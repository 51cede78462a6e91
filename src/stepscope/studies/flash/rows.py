"""Records of the flash study as their views want them: a cell of the grid, a race."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec

from stepscope.analysis.limits import matrix_ceiling, median_ms
from stepscope.records.schema import Record, Series
from stepscope.records.stats import Ratio, Summary, ratio_interval, summarize
from stepscope.report.blocks import Cell, Interval
from stepscope.studies.attention_workload import RESULTS, AttentionWorkload
from stepscope.studies.flash.cases import Shape, shape_of

OURS = "triton"
"""Ends the name of a series of calls in a row, timed by the host's clock."""
GRADIENTS = RESULTS[1:]
HOST_FROM = 0.5
"""Share of the time that the host issued for, from which on it is not the kernels' alone: a device
that starts at rest waits for what comes last."""
_FACTORS = {"float32": (2.0, 2.0)}
_SIXTEEN_BIT_FACTORS = (1.0, 1.5)
"""How often the reference's own error an output and a gradient may have."""


class GridRow:
    """One implementation at one shape."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.work = msgspec.convert(record.config, AttentionWorkload)
        self.shape = shape_of(record.config)

    @property
    def attention(self) -> str:
        return self.work.attention

    @property
    def name(self) -> str:
        return f"{self.attention} {self.shape.sizes} {self.shape.dtype}"

    @property
    def is_single(self) -> bool:
        """One head of one sequence: the lengths of the figures."""
        return self.shape.batch * self.shape.heads == 1

    def time(self, mode: str = "both") -> Summary | None:
        return _summary(self.record.find(mode))

    def issued_ms(self, mode: str = "both") -> float | None:
        """How long the host took to issue a pass, where that is not the time itself."""
        return median_ms(self.record, mode, "host") if self._on_device else None

    @property
    def host_decides(self) -> bool:
        issued, time = self.issued_ms(), self.time()
        return bool(issued and time and issued >= HOST_FROM * time.median)

    @property
    def _on_device(self) -> bool:
        return self.record.find("both", "device") is not None

    def rate(self, mode: str = "both") -> float | None:
        """FLOP/s of the median, a causal mask counted as half."""
        flops = self.record.quantity("flops", phase="" if mode == "both" else mode)
        time = self.time(mode)
        return flops / (time.median * 1e-3) if flops and time and time.median > 0.0 else None

    def share(self, mode: str = "both") -> float | None:
        rate, ceiling = self.rate(mode), matrix_ceiling(self.record)
        return rate / ceiling.value if rate and ceiling and ceiling.value > 0.0 else None

    def error_ratio(self, *results: str) -> float | None:
        """The largest of these errors in units of the reference's own."""
        ratios = []
        for name in results:
            error = self.record.quantity("error", variant=name)
            own = self.record.quantity("reference_error", variant=name)
            if error is None or not own:
                return None
            ratios.append(error / own)
        return max(ratios, default=None)

    def allowed_error(self, name: str) -> float:
        """What the policy allows: so many times the reference's own error, plus one unit in the
        last place."""
        of_output, of_gradients = _FACTORS.get(self.work.dtype, _SIXTEEN_BIT_FACTORS)
        own = self.record.quantity("reference_error", variant=name) or 0.0
        place = self.record.quantity("last_place", variant=name) or 0.0
        return (of_output if name == "output" else of_gradients) * own + place

    @cached_property
    def misses(self) -> tuple[str, ...]:
        """Results that err by more than the policy allows."""
        return tuple(
            name
            for name in RESULTS
            if (error := self.record.quantity("error", variant=name)) is not None
            and error > self.allowed_error(name)
        )


class Race:
    """Implementations that ran in turns on the same tensors."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.shape = shape_of(record.config)

    @property
    def racers(self) -> tuple[str, ...]:
        return tuple(self.record.config["racers"])

    @property
    def host_ahead(self) -> bool:
        """Whether the device was kept busy until the host had issued; the oldest records say no."""
        return bool(self.record.config.get("host_ahead"))

    def times(self, name: str, *, in_a_row: bool = False) -> Summary | None:
        return _summary(self._series(name, in_a_row=in_a_row))

    def ratio(self, peer: str, ours: str = OURS, *, in_a_row: bool = False) -> Ratio | None:
        """The peer's time over ours: above 1 we are faster."""
        own, other = (self._series(name, in_a_row=in_a_row) for name in (ours, peer))
        if own is None or other is None or not own.values or not other.values:
            return None
        return ratio_interval(own.values, other.values, level=0.95)

    def out(self, name: str) -> str | None:
        """Why it did not run."""
        return (self.record.attachment("excluded", dict[str, str]) or {}).get(name)

    def _series(self, name: str, *, in_a_row: bool) -> Series | None:
        return self.record.find("wall" if in_a_row else "step", variant=name)


def grid_rows(records: Sequence[Record]) -> tuple[GridRow, ...]:
    return tuple(GridRow(record) for record in records if record.config["kind"] == "grid")


def races(records: Sequence[Record]) -> tuple[Race, ...]:
    return tuple(Race(record) for record in records if record.config["kind"] == "race")


def tile_records(records: Sequence[Record]) -> tuple[Record, ...]:
    return tuple(record for record in records if record.config["kind"] == "tiles")


def sort_key(shape: Shape) -> tuple[object, ...]:
    return (shape.dtype, shape.batch * shape.heads > 1, shape.head, shape.seq, shape.sizes)


def interval(summary: Summary | None) -> Cell:
    if summary is None:
        return None
    return Interval(value=summary.median, low=summary.low, high=summary.high)


def _summary(series: Series | None) -> Summary | None:
    if series is None or series.unit != "ms" or not series.values:
        return None
    return summarize(series.values)
