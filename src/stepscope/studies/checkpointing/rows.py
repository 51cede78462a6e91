"""Records of the checkpointing study: strategies of the same step brought together."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepscope.model.checkpointing import NONE, inputs_kept, run_again, stretches
from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.studies.workload import Workload

_SAME_PEAK = 0.005


class Tried:
    """One strategy that was run, or was to be."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.budget: int | None = record.config.get("budget_bytes")
        planned = msgspec.convert(record.config, Workload)
        self.strategy = record.notes.get("strategy", planned.checkpoint)
        self.workload = msgspec.structs.replace(planned, checkpoint=self.strategy)

    @property
    def layers(self) -> int:
        return int(self.record.quantity("blocks") or self.workload.layers)

    @property
    def sizes(self) -> tuple[int, ...]:
        return stretches(self.strategy, self.layers)

    @property
    def inputs(self) -> int:
        return inputs_kept(self.sizes, self.layers)

    @property
    def again(self) -> float:
        """How often the forward of a block runs in the backward, on average."""
        return run_again(self.sizes, self.layers) / self.layers

    @property
    def ok(self) -> bool:
        return self.record.status == "ok"

    @property
    def peak(self) -> float:
        return self.record.quantity("peak_bytes") or 0.0

    @property
    def predicted(self) -> float | None:
        return self.record.quantity("predicted_bytes")

    @property
    def off(self) -> float | None:
        return self.predicted / self.peak - 1 if self.predicted and self.peak else None

    @property
    def peak_phase(self) -> str:
        phases = [
            (quantity.value, quantity.phase)
            for quantity in self.record.quantities
            if quantity.name == "peak_bytes" and quantity.phase
        ]
        return max(phases)[1] if phases else ""

    @property
    def ms(self) -> float | None:
        return self._median("step")

    @property
    def forward_share(self) -> float | None:
        """Of the step; None in records that have no phases."""
        forward = self._median("forward")
        return forward / self.ms if forward and self.ms else None

    def _median(self, name: str) -> float | None:
        series = self.record.find(name)
        return summarize(series.values).median if series is not None and series.values else None


class Sweep:
    """All strategies of one step."""

    def __init__(self, members: Sequence[Tried]) -> None:
        self.all = [each for each in members if each.budget is None]
        self.budgets = [each for each in members if each.budget is not None]
        self.ran = [each for each in self.all if each.ok and each.ms is not None]
        self.name = msgspec.structs.replace(members[0].workload, checkpoint=NONE).name

    def of(self, strategy: str) -> Tried | None:
        return next((each for each in self.ran if each.strategy == strategy), None)

    def slower(self, each: Tried) -> float | None:
        """Time of its step over that with all activations kept."""
        kept = self.of(NONE)
        return each.ms / kept.ms if kept and kept.ms and each.ms else None

    def predicted_slower(self, each: Tried) -> float | None:
        """The same as it should be: the forwards that run again, at the forward's share of the step
        with all activations kept."""
        kept = self.of(NONE)
        share = kept.forward_share if kept else None
        return None if share is None else 1 + each.again * share

    @property
    def front(self) -> list[Tried]:
        """Those that no other one beats in both, by peak."""
        kept = (e for e in self.ran if not any(_beats(other, e) for other in self.ran))
        return sorted(kept, key=lambda each: each.peak)


def _beats(one: Tried, other: Tried) -> bool:
    """A shorter step with no more memory, or less memory with no longer step; peaks as near to each
    other as blocks of the allocator may lie are the same."""
    ms, longer = one.ms or 0.0, other.ms or 0.0
    return (ms < longer and one.peak <= other.peak * (1 + _SAME_PEAK)) or (
        ms == longer and one.peak < other.peak
    )


def sweeps(records: Sequence[Record]) -> list[Sweep]:
    groups: dict[str, list[Tried]] = {}
    for record in records:
        each = Tried(record)
        plain = msgspec.structs.replace(each.workload, checkpoint=NONE)
        groups.setdefault(plain.key, []).append(each)
    return [Sweep(members) for members in groups.values()]
