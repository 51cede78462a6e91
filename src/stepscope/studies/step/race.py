"""A race of whole steps: every form of the peer and of ours is tried, the fastest of each race.

All share one set of weights and moments, so that a model of which one fits can be raced in several
forms. In the heats each form is built, warmed up, timed for a few steps and let go of with all that
was compiled for it, so none is short of memory because of another. A device lowers its clock as it
works, so heats cannot separate forms that are close: those of a side run off in alternating blocks.
The fastest of each side are then built once more, from the compiler's caches, and are timed twice
in this process: in blocks of consecutive steps, as in training, which is the result, and in
interleaved samples that each start on an idle device. The last form that was tried stays built,
since a whole model takes long to compile even so. At the end the energy of each is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope.errors import first_cause
from stepscope.records.schema import Quantity
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.step.cases import StepRaceCase
from stepscope.studies.step.races import Heat, Racer
from stepscope.studies.training.captured import forget_steps
from stepscope.studies.training.shared_weights import begin_moments
from stepscope.studies.training.transformer import TransformerStep
from stepscope.studies.training.workload import GRAPHS_OF_TORCH

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.measure.timer import Timing

_WARM_UP = 3
_NEAR, _MOST_NEAR = 1.02, 3
"""Forms within this factor of the fastest heat of a side, and at most so many, run off."""
_RUN_OFF_BLOCKS, _RUN_OFF_S = 4, 1.0
_UNBROKEN_S = 4.0
"""How long each side runs without a pause for its energy, after a lead."""
_FORMS = 64
"""How often the same code is compiled here: more often than torch.compile thinks sensible."""


class Entry(NamedTuple):
    """A form that is ready to run."""

    racer: Racer
    step: TransformerStep


def measure_race(case: StepRaceCase, bench: Bench) -> Measurement:
    if any(racer.workload.compile != "no" for racer in case.racers):
        import torch._dynamo.config as dynamo

        dynamo.recompile_limit = _FORMS
    field = Field(case.racers[0], bench)
    began = time.monotonic()
    for index, racer in enumerate(case.racers):
        if time.monotonic() - began > case.heat_seconds:
            field.excluded[racer.name] = "not tried: the time for heats was over"
            continue
        bench.progress(index, len(case.racers), f"heat of {racer.name}")
        field.heat(racer, case, last=index == len(case.racers) - 1)
    sides = list(field.heats)
    if {"peer", "ours"} - set(sides):
        reasons = "; ".join(f"{name}: {why}" for name, why in field.excluded.items())
        raise CaseSkipped(f"no race: {reasons}")
    # The peer's last: it may have a form that is ready, which costs minutes to build again.
    fastest = {side: field.run_off(side) for side in sorted(sides, key=lambda s: s == "peer")}
    entries = [field.entry(fastest[side]) for side in sides]
    blocks = _consecutive(
        entries, bench, "blocks of consecutive steps", case.blocks, case.block_seconds
    )
    samples = _interleaved(entries, bench, case)
    energy, no_energy = _energy(entries, bench)
    return Measurement(
        series=(*samples.series, *blocks.series),
        quantities=(*fastest["ours"].workload.quantities(), *energy),
        readings=(*blocks.readings, *samples.readings),
        notes=no_energy,
        attachments={
            "best": {side: fastest[side].name for side in sides},
            "heats": {name: heat for heats in field.heats.values() for name, heat in heats.items()},
            "excluded": field.excluded,
            "no_run_off": field.no_run_off,
        },
    )


def _consecutive(
    entries: Sequence[Entry], bench: Bench, what: str, blocks: int, seconds: float
) -> Timing:
    from stepscope.measure.consecutive import time_consecutive

    return time_consecutive(
        {entry.racer.name: entry.step.run for entry in entries},
        bench.device,
        blocks=blocks,
        block_seconds=seconds,
        before={entry.racer.name: entry.step.follow_weights for entry in entries},
        progress=lambda done, total: bench.progress(done, total, what),
    )


def _interleaved(entries: Sequence[Entry], bench: Bench, case: StepRaceCase) -> Timing:
    from stepscope.measure.interleaved import time_interleaved

    return time_interleaved(
        {entry.racer.name: entry.step.run for entry in entries},
        bench.device,
        warmup=2,
        rounds=case.rounds,
        min_seconds=case.min_seconds,
        before={entry.racer.name: entry.step.follow_weights for entry in entries},
        progress=lambda done, total: bench.progress(done, total, "interleaved samples"),
    )


def _energy(entries: Sequence[Entry], bench: Bench) -> tuple[list[Quantity], dict[str, str]]:
    """The energy of each side in consecutive steps, or a note why it is not known: the times of the
    race stand without it."""
    from stepscope.measure.energy import energy_quantities, measure_energy

    energy: list[Quantity] = []
    reasons: dict[str, None] = {}
    for index, (racer, step) in enumerate(entries):
        bench.progress(index, len(entries), f"energy of {racer.side}")
        try:
            step.follow_weights()
            measured = measure_energy(step.run, bench.device, _UNBROKEN_S)
        except Exception as error:
            measured = first_cause(error)
        quantities, why = energy_quantities(measured, None)
        energy += [msgspec.structs.replace(one, variant=racer.side) for one in quantities]
        reasons |= dict.fromkeys(why.values())
    return energy, {"no_energy": "; ".join(reasons)} if reasons else {}


class Field:
    """All forms of one step on the same weights."""

    def __init__(self, first: Racer, bench: Bench) -> None:
        self._bench = bench
        plain = msgspec.structs.replace(
            first.workload, compile="no", compile_mode="default", graph=False
        )
        self._owner = TransformerStep(plain, bench.device)
        begin_moments(self._owner.optimizer)
        self.heats: dict[str, dict[str, Heat]] = {}
        """By side and name."""
        self._racers: dict[str, Racer] = {}
        self._ready: dict[str, Entry] = {}
        self.excluded: dict[str, str] = {}
        """Why a form did not race, by name."""
        self.no_run_off: dict[str, str] = {}
        """Why the forms of a side did not run off."""

    def entry(self, racer: Racer) -> Entry:
        """Built and run once; nothing of that step is left to disturb another's capture."""
        if racer.name in self._ready:
            return self._ready[racer.name]
        step = TransformerStep(racer.workload, self._bench.device, shares=self._owner)
        step.run()
        self._bench.device.synchronize()
        forget_steps(step)
        return Entry(racer, step)

    def heat(self, racer: Racer, case: StepRaceCase, *, last: bool = False) -> None:
        """Try one form. The last of all stays ready if it may be the fastest of its side."""
        from stepscope.measure.time_limit import TookTooLong, at_most

        try:
            with at_most(case.form_seconds):
                entry, heat = self._try(racer, case)
        except CaseSkipped as skipped:
            self.excluded[racer.name] = f"refused: {skipped}"
        except TookTooLong as late:
            self.excluded[racer.name] = f"given up: {late}"
        except Exception as error:
            said = (str(error).strip().splitlines() or [""])[0]
            self.excluded[racer.name] = f"failed: {type(error).__name__}: {said}"
            # The traceback holds the frames that hold the tensors.
            del error
        else:
            self._note(racer, heat)
            if last and racer.name in {each.name for each in self.near(racer.side)}:
                forget_steps(entry.step)
                self._ready[racer.name] = entry
                self._bench.device.release()
                return
            del entry
        self._let_go(racer)

    def near(self, side: str) -> list[Racer]:
        """The fastest in its heat, and those that may be as fast."""
        heats = self.heats[side]
        order = sorted(heats, key=lambda name: heats[name].ms)
        most_ms = heats[order[0]].ms * _NEAR
        return [self._racers[name] for name in order[:_MOST_NEAR] if heats[name].ms <= most_ms]

    def run_off(self, side: str) -> Racer:
        """The fastest form of a side; forms that are close decide it in alternating blocks."""
        first, *others = near = self.near(side)
        if not others:
            return first
        try:
            found = self._alternate(near)
        except Exception as error:
            self.no_run_off[side] = first_cause(error)
            found = first
        lost = [racer for racer in near if racer.name != found.name]
        ready = self._ready.get(found.name)
        for racer in near:
            self._ready.pop(racer.name, None)
        if ready and not any(racer.workload.compile_mode in GRAPHS_OF_TORCH for racer in lost):
            # What the others compiled is small; the graphs of torch would hold their memory.
            self._ready[found.name] = ready
            self._bench.device.release()
            return found
        del ready
        for racer in near:
            self._let_go(racer)
        return found

    def _alternate(self, near: Sequence[Racer]) -> Racer:
        entries = [self.entry(racer) for racer in near]
        timing = _consecutive(
            entries, self._bench, f"run-off of {near[0].side}", _RUN_OFF_BLOCKS, _RUN_OFF_S
        )
        times = {
            racer.name: statistics.median(series.values)
            for racer, series in zip(near, timing.series, strict=True)
        }
        for racer in near:
            heat = self.heats[racer.side][racer.name]
            self._note(racer, msgspec.structs.replace(heat, turns_ms=times[racer.name]))
        for entry in entries:
            forget_steps(entry.step)
        return self._racers[min(times, key=times.__getitem__)]

    def _note(self, racer: Racer, heat: Heat) -> None:
        self._racers[racer.name] = racer
        self.heats.setdefault(racer.side, {})[racer.name] = heat

    def _try(self, racer: Racer, case: StepRaceCase) -> tuple[Entry, Heat]:
        device = self._bench.device
        began = time.monotonic()
        held = device.held_bytes()
        device.reset_peak()
        entry = self.entry(racer)
        first_s = time.monotonic() - began
        _timed(entry, device, _WARM_UP, 0.0)
        samples = _timed(entry, device, case.heat_steps, case.steady_seconds)
        peak = device.peak_bytes()
        if held is None:
            # Tensors are not counted here, and the resident set is that of all forms.
            peak = None
        elif peak is not None:
            # Weights and moments were there before and count for this form too.
            peak = peak - held + self._shared_bytes(entry.step)
        return entry, Heat(
            ms=statistics.median(samples),
            first_s=first_s,
            peak_bytes=None if peak is None else float(peak),
        )

    def _let_go(self, racer: Racer) -> None:
        """Of all that it left: copies of weights, compiled code, torch's graphs."""
        self._owner.optimizer.zero_grad(set_to_none=True)
        self._owner.model.copies.clear()  # type: ignore[union-attr,operator]
        if racer.workload.compile != "no":
            import torch._dynamo

            torch._dynamo.reset()
        self._bench.device.release()

    @staticmethod
    def _shared_bytes(step: TransformerStep) -> int:
        """Weights and moments."""
        state = (
            tensor
            for values in step.optimizer.state.values()
            for tensor in values.values()
            if tensor.numel() > 1
        )
        shared = (*step.model.parameters(), *step.model.buffers(), *state)
        return sum(tensor.numel() * tensor.element_size() for tensor in shared)


def _timed(entry: Entry, device: Device, least: int, seconds: float) -> list[float]:
    """Milliseconds of consecutive steps."""
    from stepscope.measure.consecutive import consecutive_steps

    return consecutive_steps(entry.step.run, device, seconds, least)[1]
