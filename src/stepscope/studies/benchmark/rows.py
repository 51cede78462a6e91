"""Rows of the benchmark's tables: one training step with its modes, or the same in two dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from stepscope.analysis.checks import BUSY
from stepscope.analysis.effects import Effect, quotient
from stepscope.analysis.limits import HostShare, host_bound
from stepscope.model.cost import Flops, flops
from stepscope.records.schema import Record
from stepscope.records.stats import Summary, stability, summarize
from stepscope.report.blocks import Cell, Spread
from stepscope.report.tables import STATUS
from stepscope.studies.base import Result
from stepscope.studies.benchmark.cases import BenchmarkCase
from stepscope.views.builders import grouped

_STEP, _WITH_BACKWARD = "train-step", "forward-backward"
_SOURCES = {
    "forward": (("forward", "step"), (_WITH_BACKWARD, "forward"), (_STEP, "forward")),
    "backward": ((_WITH_BACKWARD, "backward"), (_STEP, "backward")),
    "both": ((_WITH_BACKWARD, "step"),),
    "optimizer": ((_STEP, "optimizer"),),
    "step": ((_STEP, "step"),),
}
"""Modes and series that time a part of the step, the best one first: a separate mode, else a
phase of a longer mode."""
_BASE = "float32"


class BenchmarkRow:
    """One training step, with the records of its modes."""

    def __init__(self, results: Sequence[Result[BenchmarkCase]]) -> None:
        self.by_mode: dict[str, Record] = {case.mode: record for record, case in results}
        self.workload = results[-1].case
        self.records = tuple(self.by_mode.values())

    # Cached: of the rows of many records, a verdict needs the name and the times of a few.
    @cached_property
    def name(self) -> str:
        return self.workload.name

    @cached_property
    def forward(self) -> Summary | None:
        return self.summary("forward")

    @cached_property
    def backward(self) -> Summary | None:
        return self.summary("backward")

    @cached_property
    def both(self) -> Summary | None:
        return self.summary("both")

    @cached_property
    def optimizer(self) -> Summary | None:
        return self.summary("optimizer")

    @cached_property
    def step(self) -> Summary | None:
        return self.summary("step")

    @cached_property
    def flops(self) -> Flops | None:
        """FLOPs of the step; None for a user's model, whose shape is unknown."""
        model = self.workload.shape
        return None if model is None else flops(model, self.workload.batch, self.workload.context)

    @property
    def done(self) -> list[Record]:
        return [record for record in self.records if record.status == "ok"]

    @property
    def step_record(self) -> Record | None:
        """The record of the train step, if it has samples."""
        record = self.by_mode.get(_STEP)
        return record if record is not None and record.status == "ok" else None

    def source(self, part: str) -> tuple[Record, str] | None:
        """The record that times a part of the step, and the name of its series."""
        for mode, name in _SOURCES[part]:
            record = self.by_mode.get(mode)
            series = record.find(name) if record is not None and record.status == "ok" else None
            if record is not None and series is not None and series.values:
                return record, name
        return None

    def summary(self, part: str) -> Summary | None:
        source = self.source(part)
        series = source[0].find(source[1]) if source else None
        return summarize(series.values) if series else None

    @property
    def ratio(self) -> float | None:
        """Time of the backward pass over that of the forward pass."""
        if self.forward is None or self.backward is None:
            return None
        return self.backward.median / self.forward.median

    @property
    def ratio_effect(self) -> Effect | None:
        """The same with its interval."""
        if self.forward is None or self.backward is None:
            return None
        return quotient(self.backward, self.forward)

    def spread(self, part: str) -> Cell:
        """Mean and standard deviation of a part, or the status of its mode."""
        summary: Summary | None = getattr(self, part)
        if summary is None:
            return self.cell(part, "mean")
        return Spread(value=summary.mean, plus_minus=summary.std)

    def cell(self, part: str, what: str) -> Cell:
        """A statistic of a part, or the status of the mode that should have measured it."""
        summary = getattr(self, part)
        if summary is not None:
            return float(getattr(summary, what))
        # A failed longer step says nothing about the forward pass alone.
        sources = _SOURCES[part][:1] if part == "forward" else _SOURCES[part]
        tried = (self.by_mode[mode].status for mode, _ in sources if mode in self.by_mode)
        return next((STATUS.get(status, status) for status in tried if status != "ok"), None)


def rows_of(results: Sequence[Result[BenchmarkCase]]) -> tuple[BenchmarkRow, ...]:
    """A row for each train step; modes without an optimizer are shared by all optimizers."""
    rows: list[BenchmarkRow] = []
    for group in grouped(results, lambda result: result.case.key_of_forward).values():
        steps = [result for result in group if result.case.mode == _STEP]
        others = [result for result in group if result.case.mode != _STEP]
        rows += [BenchmarkRow([*others, step]) for step in steps] or [BenchmarkRow(others)]
    return tuple(rows)


class DtypePair(NamedTuple):
    """The same step in another dtype and in float32."""

    row: BenchmarkRow
    base: BenchmarkRow

    @property
    def workload(self) -> BenchmarkCase:
        return self.row.workload

    def gain(self, part: str) -> float | None:
        own: Summary | None = getattr(self.row, part)
        base: Summary | None = getattr(self.base, part)
        return base.median / own.median if own and base and own.median else None

    @property
    def effect(self) -> Effect | None:
        """Speedup of the step, or of the longest part of it that was timed."""
        for part in ("step", "both", "forward"):
            own: Summary | None = getattr(self.row, part)
            base: Summary | None = getattr(self.base, part)
            if own and base and own.median:
                return quotient(base, own)
        return None

    @property
    def speedup(self) -> float | None:
        return self.effect.value if self.effect else None

    @property
    def host(self) -> HostShare | None:
        modes = (self.row.by_mode.get(mode) for mode in (_STEP, _WITH_BACKWARD, "forward"))
        record = next((r for r in modes if r is not None and r.status == "ok"), None)
        return None if record is None else host_bound(record)

    @property
    def name(self) -> str:
        return f"{self.workload.size} at context {self.workload.context}"


def pairs_of(rows: Sequence[BenchmarkRow]) -> list[DtypePair]:
    """The pairs with at least one part timed in both dtypes."""

    def key(row: BenchmarkRow) -> str:
        return msgspec.structs.replace(row.workload, dtype=_BASE, mode="forward").key

    base = {key(row): row for row in rows if row.workload.dtype == _BASE}
    pairs = (
        DtypePair(row, base[key(row)])
        for row in rows
        if row.workload.dtype != _BASE and key(row) in base
    )
    return [pair for pair in pairs if pair.speedup is not None]


def common_context(rows: Sequence[BenchmarkRow]) -> int:
    """The most frequent context; the longest if several are equally frequent."""
    counted = Counter(row.workload.context for row in rows)
    return max(counted, key=lambda context: (counted[context], context))


def is_steady(record: Record) -> bool:
    """True if the step has samples and no check doubts them."""
    series = record.find("step")
    if series is None or not series.values or stability(series.values):
        return False
    # Even steady samples are too long on a busy machine.
    return BUSY not in {check.code for check in record.failed_checks}
