"""Records of the profile study with what their traces say, grouped by training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from stepscope.analysis.limits import median_ms
from stepscope.analysis.trace.summary import Summary
from stepscope.model.config import precision
from stepscope.model.cost import parameters
from stepscope.model.memory import ALL
from stepscope.records.schema import Record
from stepscope.studies.workload import MODES, Mode, Workload

_GRAPH_HELPS = 0.9
"""A replay below this share of the step shows that launches held it up."""
_BATCH_IS_FREE = 0.75
"""So does a larger batch that takes less than this share of so many times as long."""


class Traced(NamedTuple):
    """One mode of a training step."""

    record: Record
    workload: Workload
    summary: Summary

    def timer_ms(self, phase: str) -> float | None:
        """By the timer, without the profiler; the step from start to idle by the host's clock."""
        if phase == "step":
            return median_ms(self.record, "step", "host")
        if phase == "forward" and self.workload.mode == "forward":
            return median_ms(self.record, "step")
        return median_ms(self.record, phase)

    def traced_ms(self, phase: str) -> float | None:
        return self.summary.wall_ms if phase == "step" else self.summary.phases.get(phase)

    @property
    def overhead(self) -> float | None:
        """What the profiler adds to the step, as a share of it."""
        bare = self.timer_ms("step")
        return None if not bare else self.summary.wall_ms / bare - 1

    def issue_ms(self) -> float | None:
        """What the host takes to issue the step without the profiler; on a CPU there is none."""
        return median_ms(self.record, "issue", "host")

    def host_share(self) -> float:
        return self.summary.idle_of("host") / self.summary.wall_ms

    @property
    def idle_without_profiler(self) -> float | None:
        """The share of the timed step that the traced kernels do not fill.

        The profiler makes the host slower and leaves kernels as they are, so idle time in a trace
        is more than there is without it.
        """
        bare = self.timer_ms("step")
        return None if not bare else max(0.0, 1 - self.summary.busy_ms / bare)

    def host_limits(self, least: float) -> bool:
        """In the trace by its launches, without the profiler by what kernels leave empty, and by
        the experiments where there are any."""
        bare = self.idle_without_profiler
        return (
            self.summary.on_device
            and self.host_share() >= least
            and (bare is None or bare >= least)
            and self.experiments_say() is not False
        )

    def experiments_say(self) -> bool | None:
        """Whether fewer launches or more work for each show that the host limits; None: untried."""
        graph, larger, times = self.graph_ratio(), self.larger_batch_ratio(), self.larger_batch()
        votes = [
            *([] if graph is None else [graph < _GRAPH_HELPS]),
            *([] if larger is None or times is None else [larger < _BATCH_IS_FREE * times]),
        ]
        return any(votes) if votes else None

    def graph_ratio(self) -> float | None:
        """The replay of all but the optimizer, over the same part launched kernel by kernel."""
        replay = median_ms(self.record, "graph_replay")
        phases = ("step",) if self.workload.mode == "forward" else ("forward", "loss", "backward")
        parts = [median_ms(self.record, phase) for phase in phases]
        return _ratio(replay, sum(p for p in parts if p is not None) if all(parts) else None)

    def larger_batch_ratio(self) -> float | None:
        return _ratio(median_ms(self.record, "larger_batch"), median_ms(self.record, "step"))

    def larger_batch(self) -> float | None:
        held = self.record.quantity("larger_batch")
        return None if held is None else held / self.workload.batch


class Group(NamedTuple):
    """The modes of one training step that were traced."""

    workload: Workload
    modes: dict[Mode, Traced]

    def key(self) -> tuple[str, int, int, str, str]:
        w = self.workload
        extras = [
            *([] if w.table == "2025" else [w.table]),
            *([] if w.attention == "reference" else [w.attention]),
            *([] if w.compile == "no" else [f"compiled by {w.compile}"]),
            *([] if w.optimizer == "torch" else [f"adamw {w.optimizer}"]),
            *([] if w.compile_mode == "default" else [w.compile_mode]),
            *(["fused loss"] if w.loss == "fused" else []),
            *(["fused pieces"] if w.fused else []),
            *(["joined"] if w.joined else []),
            *(["searched"] if w.searched else []),
            *([] if w.keep == ALL else [f"keeps {w.keep}"]),
            *(["graph"] if w.graph else []),
            *(f"{name} {value}" for name, value in sorted(w.overrides.items())),
        ]
        return w.size, w.context, w.batch, w.dtype, ", ".join(extras)

    def fullest(self) -> Traced:
        """The mode with the most phases."""
        return next(
            self.modes[m] for m in ("train-step", "forward-backward", "forward") if m in self.modes
        )

    @property
    def name(self) -> str:
        return self.workload.name

    def layers(self) -> int:
        return self.workload.layers

    def element_bytes(self) -> int:
        """Of what the softmax reads: autocast lets it compute in float32."""
        return 2 if precision(self.workload.dtype).weights == "bfloat16" else 4


def groups(records: Sequence[Record]) -> list[Group]:
    found: dict[tuple[str, int, int, str, str], Group] = {}
    for record in records:
        if record.status != "ok" or "profile" not in record.attachments:
            continue
        workload = msgspec.convert(record.config, Workload)
        traced = Traced(record, workload, record.required("profile", Summary))
        group = Group(workload, {})
        found.setdefault(group.key(), group).modes[workload.mode] = traced
    ordered = sorted(found.values(), key=_order)
    return [Group(g.workload, {m: g.modes[m] for m in MODES if m in g.modes}) for g in ordered]


def leading(found: Sequence[Group]) -> Group:
    """The one that is told in full: of those traced in the most modes the longest."""
    return max(found, key=lambda group: (len(group.modes), _wall(group)))


def _order(group: Group) -> tuple[Any, ...]:
    """Small models first, short contexts, the larger batch; formats and compiled ones after."""
    w = group.workload
    total = parameters(w.shape).total if w.shape else 0
    return total, w.size, w.context, -w.batch, group.key()[-1], w.dtype != "float32", w.dtype


def pairs(found: Sequence[Group]) -> list[tuple[Group, Group]]:
    """Groups that differ in one thing only: the number format, or whether they are compiled."""
    return [
        (first, second)
        for place, first in enumerate(found)
        for second in found[place + 1 :]
        if _differ_in(first.workload, second.workload) in (["dtype"], ["compile"])
        and set(first.modes) & set(second.modes)
    ]


def telling_pairs(found: Sequence[Group]) -> list[tuple[Group, Group]]:
    """Of each size, and of each thing in which two differ, the pair with the longest step."""
    chosen: dict[tuple[str, ...], tuple[Group, Group]] = {}
    for first, second in pairs(found):
        key = (first.workload.size, *_differ_in(first.workload, second.workload))
        held = chosen.get(key)
        if held is None or _wall(first) > _wall(held[0]):
            chosen[key] = (first, second)
    return list(chosen.values())


def _wall(group: Group) -> float:
    return group.fullest().summary.wall_ms


def _differ_in(first: Workload, second: Workload) -> list[str]:
    return [
        name
        for name in first.__struct_fields__
        if name != "mode" and getattr(first, name) != getattr(second, name)
    ]


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
