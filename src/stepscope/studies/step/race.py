"""A race of whole steps: every form of the peer and of ours is tried, the fastest of each race.

All share one set of weights and moments, so that a model of which one fits can be raced in several
forms. In the heats each form is built, warmed up, timed for a few steps and let go of unless it is
the fastest of its side. The last of each side then take turns, sample by sample, in this process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.records.schema import Quantity
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.step.goals import Heat, Racer
from stepscope.studies.workload import TrainingStep

if TYPE_CHECKING:
    import torch

    from stepscope.measure.device import Device

_WARM_UP, _WARM_UP_S, _HEAT_S = 3, 3.0, 5.0
"""Steps of a heat, or fewer where they take longer than these seconds together."""
_FORMS = 64
"""How often the same code is compiled here: more often than torch.compile thinks sensible."""


class Entry:
    """A form that is ready to run."""

    def __init__(self, racer: Racer, step: TrainingStep) -> None:
        self.racer = racer
        self.step = step
        self._phases = step.phases()

    def run(self) -> None:
        self.step.reset()
        for phase in self._phases:
            phase.run()


def measure_race(config: dict[str, Any], bench: Bench) -> Measurement:
    from stepscope.measure.turns import time_in_turns

    _allow_many_forms()
    racers = [msgspec.convert(racer, Racer) for racer in config["racers"]]
    field = Field(bench)
    for place, racer in enumerate(racers):
        bench.progress(place, len(racers), f"heat of {racer.name}")
        field.heat(racer, config["heat_steps"])
    best = field.fastest
    if "peer" not in best or "ours" not in best:
        said = "; ".join(f"{key.removeprefix('out.')}: {why}" for key, why in field.notes.items())
        raise CaseSkipped(f"no race: {said}")
    contestants: dict[str, Callable[[], object]] = {
        entry.racer.name: entry.run for entry in best.values()
    }
    timing = time_in_turns(
        contestants,
        bench.device,
        warmup=1,
        rounds=config["rounds"],
        min_seconds=config["min_seconds"],
        progress=lambda done, total: bench.progress(done, total, "rounds"),
    )
    quantities: dict[str, Quantity] = dict(best["ours"].racer.workload.quantities())
    return Measurement(
        series=timing.series,
        quantities=quantities,
        readings=timing.readings,
        notes=field.notes | {f"best.{side}": entry.racer.name for side, entry in best.items()},
    )


class Field:
    """All forms of one step on the same weights."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._first: TrainingStep | None = None
        self.fastest: dict[str, Entry] = {}
        self._times: dict[str, float] = {}
        self.notes: dict[str, str] = {}

    def heat(self, racer: Racer, steps: int) -> None:
        device = self._bench.device
        device.release()
        try:
            entry, heat = self._try(racer, steps, device)
        except CaseSkipped as skipped:
            self.notes[f"out.{racer.name}"] = f"refused: {skipped}"
            return
        except Exception as error:
            said = (str(error).strip().splitlines() or [""])[0]
            self.notes[f"out.{racer.name}"] = f"failed: {type(error).__name__}: {said}"
            # The traceback holds the frames that hold the tensors.
            del error
            device.release()
            return
        self.notes[f"heat.{racer.name}"] = msgspec.json.encode(heat).decode()
        if heat.ms < self._times.get(racer.side, float("inf")):
            self.fastest[racer.side], self._times[racer.side] = entry, heat.ms

    def _try(self, racer: Racer, steps: int, device: Device) -> tuple[Entry, Heat]:
        began = time.monotonic()
        held = device.held_bytes()
        device.reset_peak()
        step = TrainingStep(racer.workload, device, shares=self._first)
        shared = self._shared_bytes(step)
        if self._first is not None and held is not None:
            held -= shared
        entry = Entry(racer, step)
        entry.run()
        device.synchronize()
        first_s = time.monotonic() - began
        if self._first is None:
            self._first = step
        _timed(entry, device, _WARM_UP, _WARM_UP_S)
        samples = _timed(entry, device, steps, _HEAT_S)
        peak = device.peak_bytes()
        own = None if peak is None or held is None else float(peak - held)
        return entry, Heat(ms=statistics.median(samples), first_s=first_s, peak_bytes=own)

    @staticmethod
    def _shared_bytes(step: TrainingStep) -> int:
        """Weights and optimizer state: they were there before this form and count for it too."""

        def size(tensors: list[torch.Tensor]) -> int:
            return sum(t.numel() * t.element_size() for t in tensors)

        state = [
            tensor
            for held in step.optimizer.state.values()
            for tensor in held.values()
            if tensor.numel() > 1
        ]
        return size([*step.model.parameters(), *step.model.buffers(), *state])


def _timed(entry: Entry, device: Device, steps: int, seconds: float) -> list[float]:
    """Milliseconds of so many steps, or of as many as begin within that time."""
    samples: list[float] = []
    while len(samples) < steps and sum(samples) < seconds * 1e3:
        device.synchronize()
        start = time.perf_counter()
        entry.run()
        device.synchronize()
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def _allow_many_forms() -> None:
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = _FORMS
