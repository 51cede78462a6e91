"""Records of the same training step, brought together: one row for its three modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import msgspec

from stepscope.analysis.lints import BUSY
from stepscope.model.config import ModelConfig
from stepscope.model.cost import Flops, flops
from stepscope.records.schema import Record
from stepscope.records.stats import Summary, stability, summarize
from stepscope.report.blocks import Cell
from stepscope.studies.workload import Workload

_STATUS_TEXT = {"oom": "OOM", "error": "error", "timeout": "timeout", "skipped": "skipped"}
_WHOLE, _WITH_BACKWARD = "train-step", ("forward-backward", "train-step")


class Row:
    """One training step under study, with the records of its modes."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.by_mode = {record.config["mode"]: record for record in records}
        self.workload = msgspec.convert(records[-1].config, Workload)

    @cached_property
    def model(self) -> ModelConfig | None:
        """None for a model of one's own, whose shape is not known."""
        return self.workload.shape

    @cached_property
    def flops(self) -> Flops | None:
        if self.model is None:
            return None
        return flops(self.model, self.workload.batch, self.workload.context)

    @property
    def name(self) -> str:
        return self.workload.name

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(self.by_mode.values())

    @property
    def step_record(self) -> Record | None:
        """The train step's record, if it has samples."""
        return self._ok(_WHOLE)

    def _ok(self, mode: str) -> Record | None:
        record = self.by_mode.get(mode)
        return record if record is not None and record.status == "ok" else None

    @cached_property
    def forward(self) -> Summary | None:
        """The forward alone, else as a phase of a longer step."""
        alone = self._ok("forward")
        return _summary(alone, "step") if alone else self._phase("forward", _WITH_BACKWARD)

    @cached_property
    def backward(self) -> Summary | None:
        return self._phase("backward", _WITH_BACKWARD)

    @cached_property
    def both(self) -> Summary | None:
        """Forward, loss and backward timed as one."""
        return _summary(self._ok("forward-backward"), "step")

    @cached_property
    def optimizer(self) -> Summary | None:
        return self._phase("optimizer", (_WHOLE,))

    @cached_property
    def step(self) -> Summary | None:
        return _summary(self._ok(_WHOLE), "step")

    def _phase(self, name: str, modes: Sequence[str]) -> Summary | None:
        return _summary(self._holder(name, modes), name)

    def _holder(self, name: str, modes: Sequence[str] = _WITH_BACKWARD) -> Record | None:
        """The record that a phase is taken from."""
        held = (self._ok(mode) for mode in modes)
        return next((record for record in held if _summary(record, name) is not None), None)

    @property
    def ratio(self) -> float | None:
        """Backward over forward."""
        if self.forward is None or self.backward is None:
            return None
        return self.backward.median / self.forward.median

    @property
    def ratio_is_steady(self) -> bool:
        """Whether the samples of both of its parts are."""
        alone = self._ok("forward")
        parts = [
            (alone, "step") if alone else (self._holder("forward"), "forward"),
            (self._holder("backward"), "backward"),
        ]
        return all(record is not None and is_steady(record, name) for record, name in parts)

    def cell(self, summary: Summary | None, what: str, *modes: str) -> Cell:
        """One number of a summary, or what became of the mode that would have given it."""
        if summary is not None:
            return float(getattr(summary, what))
        for mode in modes:
            if mode in self.by_mode and self.by_mode[mode].status != "ok":
                return _STATUS_TEXT[self.by_mode[mode].status]
        return None


def rows_of(records: Sequence[Record]) -> tuple[Row, ...]:
    """A row for each train step; the modes without an optimizer serve all of them."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        workload = msgspec.convert(record.config, Workload)
        alike = msgspec.structs.replace(workload, mode="forward", optimizer="torch")
        groups.setdefault(alike.key, []).append(record)
    rows = []
    for group in groups.values():
        steps = [record for record in group if record.config["mode"] == _WHOLE]
        others = [record for record in group if record.config["mode"] != _WHOLE]
        rows += [Row([*others, step]) for step in steps] or [Row(others)]
    return tuple(rows)


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


def _summary(record: Record | None, name: str) -> Summary | None:
    series = record.find(name) if record is not None else None
    return summarize(series.values) if series is not None and series.values else None
