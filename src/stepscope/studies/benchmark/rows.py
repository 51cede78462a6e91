"""Rows of the benchmark's tables: one training step with its modes, or the same in two dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from stepscope.analysis.limits import HostShare, host_bound
from stepscope.analysis.lints import BUSY
from stepscope.model.cost import Flops, flops
from stepscope.records.schema import Record
from stepscope.records.stats import Summary, stability, summarize
from stepscope.report.blocks import Cell
from stepscope.report.tables import STATUS
from stepscope.studies.base import Result
from stepscope.studies.benchmark.cases import BenchmarkCase

_WHOLE, _WITH_BACKWARD = "train-step", "forward-backward"
_SOURCES = {
    "forward": (("forward", "step"), (_WITH_BACKWARD, "forward"), (_WHOLE, "forward")),
    "backward": ((_WITH_BACKWARD, "backward"), (_WHOLE, "backward")),
    "both": ((_WITH_BACKWARD, "step"),),
    "optimizer": ((_WHOLE, "optimizer"),),
    "step": ((_WHOLE, "step"),),
}
"""Modes and series that time a part of the step, the best one first: a mode of its own, else a
phase of a longer one."""
_BASE = "float32"


class Row:
    """One training step, with the records of its modes."""

    def __init__(self, results: Sequence[Result[BenchmarkCase]]) -> None:
        self.by_mode: dict[str, Record] = {case.mode: record for record, case in results}
        self.workload = results[-1].case
        self.name = self.workload.name
        self.records = tuple(self.by_mode.values())
        self.forward, self.backward, self.both, self.optimizer, self.step = map(
            self.summary, _SOURCES
        )

    @cached_property
    def flops(self) -> Flops | None:
        """None for a user's model, whose shape is not known."""
        model = self.workload.shape
        return None if model is None else flops(model, self.workload.batch, self.workload.context)

    @property
    def done(self) -> list[Record]:
        return [record for record in self.records if record.status == "ok"]

    @property
    def step_record(self) -> Record | None:
        """The train step's record, if it has samples."""
        record = self.by_mode.get(_WHOLE)
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
        """Backward over forward."""
        if self.forward is None or self.backward is None:
            return None
        return self.backward.median / self.forward.median

    @property
    def ratio_is_steady(self) -> bool:
        """Whether the samples of both of its parts are."""
        parts = (self.source("forward"), self.source("backward"))
        return all(part is not None and is_steady(*part) for part in parts)

    def cell(self, part: str, what: str) -> Cell:
        """One number of a summary, or the status of the mode that would have given it."""
        summary = getattr(self, part)
        if summary is not None:
            return float(getattr(summary, what))
        # A longer step that failed says nothing about the forward alone.
        sources = _SOURCES[part][:1] if part == "forward" else _SOURCES[part]
        tried = (self.by_mode[mode].status for mode, _ in sources if mode in self.by_mode)
        return next((STATUS.get(one, one) for one in tried if one != "ok"), None)


def rows_of(results: Sequence[Result[BenchmarkCase]]) -> tuple[Row, ...]:
    """A row for each train step; the modes without an optimizer serve all of them."""
    groups: dict[str, list[Result[BenchmarkCase]]] = {}
    for result in results:
        alike = msgspec.structs.replace(result.case, mode="forward", optimizer="torch")
        groups.setdefault(alike.key, []).append(result)
    rows = []
    for group in groups.values():
        steps = [result for result in group if result.case.mode == _WHOLE]
        others = [result for result in group if result.case.mode != _WHOLE]
        rows += [Row([*others, step]) for step in steps] or [Row(others)]
    return tuple(rows)


class Pair(NamedTuple):
    """The same step in another dtype and in float32."""

    row: Row
    base: Row

    @property
    def workload(self) -> BenchmarkCase:
        return self.row.workload

    def gain(self, part: str) -> float | None:
        mine: Summary | None = getattr(self.row, part)
        theirs: Summary | None = getattr(self.base, part)
        return theirs.median / mine.median if mine and theirs and mine.median else None

    @property
    def whole(self) -> float | None:
        """Of the step, or of the longest part of it that was timed."""
        return self.gain("step") or self.gain("both") or self.gain("forward")

    @property
    def host(self) -> HostShare | None:
        modes = (self.row.by_mode.get(mode) for mode in (_WHOLE, _WITH_BACKWARD, "forward"))
        record = next((one for one in modes if one is not None and one.status == "ok"), None)
        return None if record is None else host_bound(record)

    @property
    def name(self) -> str:
        return f"{self.workload.size} at context {self.workload.context}"


def pairs_of(rows: Sequence[Row]) -> list[Pair]:
    """Those that have a time in common."""

    def key(row: Row) -> str:
        return msgspec.structs.replace(row.workload, dtype=_BASE, mode="forward").key

    base = {key(row): row for row in rows if row.workload.dtype == _BASE}
    found = (
        Pair(row, base[key(row)])
        for row in rows
        if row.workload.dtype != _BASE and key(row) in base
    )
    return [pair for pair in found if pair.whole is not None]


def common_context(rows: Sequence[Row]) -> int:
    """The context that most rows have, the longest of several."""
    counted = Counter(row.workload.context for row in rows)
    return max(counted, key=lambda context: (counted[context], context))


def is_steady(record: Record, name: str = "step") -> bool:
    """Whether there are samples of that name, with nothing doubtful about them."""
    series = record.find(name)
    if series is None or not series.values or stability(series.values):
        return False
    # As even as they may be: on a busy machine all of them are too long.
    return BUSY not in {lint.code for lint in record.lints}
