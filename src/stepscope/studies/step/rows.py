"""Records of the step study, sorted by what they show."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from stepscope.analysis.limits import HostShare, host_bound, matrix_ceiling, step_ms
from stepscope.analysis.power import Draw, draw
from stepscope.analysis.trace.summary import Summary as Trace
from stepscope.records.schema import Record
from stepscope.records.stats import Ratio, Summary, paired_ratio, ratio_interval, summarize
from stepscope.studies.step.ladder import RUNGS, START
from stepscope.studies.step.races import RACES, Heat, RaceSpec
from stepscope.studies.workload import Workload

TAIL = 10
"""The end of a loss curve: its last tenth."""
AGREES_WITHIN = 0.005
FALLS_BY = 0.3


class Stand(NamedTuple):
    """A rung's record, whatever became of it."""

    rung: str
    how: str
    record: Record
    workload: Workload

    @property
    def step(self) -> Summary | None:
        return step_ms(self.record) if self.record.status == "ok" else None

    @property
    def host(self) -> HostShare | None:
        """How much of it the device waited for the host."""
        return host_bound(self.record) if self.record.status == "ok" else None

    @property
    def peak(self) -> float | None:
        """On a host it would be what the process grew by, most of which was there before."""
        on_host = self.record.environment.device_kind == "cpu"
        return None if on_host else self.record.quantity("peak_bytes")


class Ladder(NamedTuple):
    """All rungs of one model, context and batch."""

    stands: tuple[Stand, ...]

    @property
    def name(self) -> str:
        w = self.stands[0].workload
        return f"{w.model_name} at context {w.context}, batch {w.batch}"

    @property
    def first(self) -> Stand | None:
        return next((s for s in self.stands if s.rung == START and s.step), None)

    def climb(self) -> list[Stand]:
        """The start, then each rung with all below it."""
        return [s for s in self.stands if s.how != "alone"]


def ladders(records: Sequence[Record]) -> list[Ladder]:
    found: dict[tuple[object, ...], list[Stand]] = {}
    for record in records:
        if record.config["kind"] == "ladder":
            w = msgspec.convert(record.config, Workload)
            key = (w.table, w.size, w.context, w.batch, tuple(sorted(w.overrides.items())))
            held = Stand(record.config["rung"], record.config["how"], record, w)
            found.setdefault(key, []).append(held)
    order = {name: place for place, name in enumerate((START, *RUNGS))}
    return [
        Ladder(tuple(sorted(held, key=lambda s: (order[s.rung], s.how != "alone"))))
        for held in found.values()
    ]


class Curve(NamedTuple):
    """The losses of one rung, a row for each seed."""

    rung: str
    by_seed: dict[int, tuple[float, ...]]
    lost: tuple[Record, ...]

    def ends(self) -> dict[int, float]:
        """Of each seed the mean of the last steps."""
        return {
            seed: sum(tail) / len(tail)
            for seed, values in self.by_seed.items()
            if (tail := values[-max(1, len(values) // TAIL) :])
        }

    def mean(self) -> tuple[float, ...]:
        return tuple(sum(step) / len(step) for step in zip(*self.by_seed.values(), strict=False))

    def fell_by(self) -> float | None:
        """The least of all seeds, as a share of the first loss."""
        ends = self.ends()
        return min(
            (1 - ends[seed] / values[0] for seed, values in self.by_seed.items()), default=None
        )

    def apart(self, yardstick: Curve) -> float | None:
        """The end's distance from the other curve's of the same seed: the farthest of all seeds."""
        ends, other = self.ends(), yardstick.ends()
        return max(
            (round(ends[seed] / other[seed] - 1, 6) for seed in ends if seed in other),
            key=abs,
            default=None,
        )

    def apart_by_stretch(self, yardstick: Curve, steps: int) -> tuple[float, ...]:
        """The distance from the other curve's of the same seed in stretches of so many steps: the
        mean of all seeds."""
        pairs = [
            (values, yardstick.by_seed[seed])
            for seed, values in self.by_seed.items()
            if seed in yardstick.by_seed
        ]
        most = min((len(values) for pair in pairs for values in pair), default=0)
        return tuple(
            sum(sum(own[at : at + steps]) / sum(other[at : at + steps]) - 1 for own, other in pairs)
            / len(pairs)
            for at in range(0, most - most % steps, steps)
        )


def curves(records: Sequence[Record]) -> dict[str, Curve]:
    held: dict[str, list[Record]] = {}
    for record in records:
        if record.config["kind"] == "loss":
            held.setdefault(record.config["rung"], []).append(record)
    return {
        rung: Curve(
            rung,
            {
                record.config["seed"]: series.values
                for record in held[rung]
                if (series := record.find("loss")) is not None and series.values
            },
            tuple(record for record in held[rung] if record.status != "ok"),
        )
        for rung in (START, *RUNGS)
        if rung in held
    }


class Traced(NamedTuple):
    record: Record
    rung: str
    workload: Workload
    trace: Trace


def traced(records: Sequence[Record]) -> list[Traced]:
    found = []
    for record in records:
        if record.config["kind"] == "waterfall" and "profile" in record.attachments:
            workload = msgspec.convert(record.config, Workload)
            if record.find("replay") is None:
                # Without a replay the times are those of the step kernel by kernel.
                workload = msgspec.structs.replace(workload, graph=False)
            trace = record.required("profile", Trace)
            found.append(Traced(record, record.config["rung"], workload, trace))
    return found


class Lead(NamedTuple):
    """How many times as fast as the peer one side is where steps follow each other."""

    peer_ms: float
    ms: float
    ratio: Ratio | None
    """From blocks that alternate; None where each side ran in one block, for its energy."""

    @property
    def value(self) -> float:
        return self.peer_ms / self.ms if self.ratio is None else self.ratio.value


class Race(NamedTuple):
    record: Record
    name: str
    spec: RaceSpec
    others: tuple[Race, ...] = ()
    """Of the same step, in other runs."""

    def best(self, side: str) -> str | None:
        return (self.record.attachment("best", dict[str, str]) or {}).get(side)

    def times(self, side: str) -> Summary | None:
        """Interleaved samples, each from an idle device."""
        name = self.best(side)
        series = self.record.find("step", variant=name) if name else None
        return summarize(series.values) if series is not None and series.values else None

    def lead(self, side: str = "ours") -> Lead | None:
        """The peer against one side in consecutive steps; None where they were not measured."""
        peer, own = self.blocks("peer"), self.blocks(side)
        if peer and own:
            ratio = paired_ratio(own, peer, level=0.95)
            return Lead(statistics.median(peer), statistics.median(own), ratio)
        alone, others = self.draw(side), self.draw("peer")
        if alone is None or others is None:
            return None
        return Lead(others.step_ms, alone.step_ms, None)

    def blocks(self, side: str) -> tuple[float, ...]:
        """The median step of each block of consecutive steps, in ms."""
        series = self.record.find("consecutive", variant=self.best(side) or "")
        return () if series is None else series.values

    def ratio(self, side: str = "ours") -> Ratio | None:
        """The peer's time over ours in interleaved samples."""
        peer, ours = self.best("peer"), self.best(side)
        if peer is None or ours is None:
            return None
        above, below = (self.record.find("step", variant=name) for name in (peer, ours))
        if above is None or below is None:
            return None
        return ratio_interval(below.values, above.values, level=0.95)

    def heats(self) -> dict[str, Heat | str]:
        """Every form that was tried: how it did, or why it is out."""
        heats = self.record.attachment("heats", dict[str, Heat]) or {}
        if self.record.environment.device_kind == "cpu":
            heats = {
                name: msgspec.structs.replace(heat, peak_bytes=None) for name, heat in heats.items()
            }
        return {**heats, **(self.record.attachment("excluded", dict[str, str]) or {})}

    def peak(self, side: str) -> float | None:
        name = self.best(side)
        heat = self.heats().get(name) if name else None
        return heat.peak_bytes if isinstance(heat, Heat) else None

    def draw(self, side: str) -> Draw | None:
        return draw(self.record, side)

    def form(self, side: str) -> str:
        return (self.best(side) or "").partition(": ")[2]

    def step_ms(self, side: str = "ours") -> float | None:
        """A step among consecutive steps, or a single sample where they were not measured."""
        lead, times = self.lead(side), self.times(side)
        return lead.ms if lead is not None else times.median if times is not None else None

    def mfu(self, side: str = "ours") -> float | None:
        """Relative to the data sheet's rate for the dtype of the matmuls, or the measured one."""
        ms, flops = self.step_ms(side), self.record.quantity("flops")
        ceiling = matrix_ceiling(self.record, measured=False) or matrix_ceiling(self.record)
        if ms is None or flops is None or ceiling is None or ms <= 0:
            return None
        return flops / (ms * 1e-3) / ceiling.value


def races(records: Sequence[Record]) -> list[Race]:
    """Of several the one in which most forms of the peer ran, since its fastest is known of what
    was tried. Of those with as many, that in which it comes nearest to ours."""
    held: dict[str, list[Race]] = {}
    for record in records:
        if record.config["kind"] == "race" and record.config["race"] in RACES:
            name = record.config["race"]
            held.setdefault(name, []).append(Race(record, name, RACES[name]))
    found = []
    for name in RACES:
        if name in held:
            first, *others = sorted(
                held[name], key=lambda race: (-peers_that_ran(race), _lead(race))
            )
            found.append(first._replace(others=tuple(others)))
    return found


def peers_that_ran(race: Race) -> int:
    return sum(
        isinstance(heat, Heat) and form.startswith("peer: ") for form, heat in race.heats().items()
    )


def _lead(race: Race) -> float:
    ratio = race.ratio()
    return float("inf") if ratio is None else ratio.value
