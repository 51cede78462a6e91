"""Compare full training steps: try every variant, then time the fastest of each side.

All variants share one set of weights and moments, so a model of which only one copy fits can
run in several variants. A trial ("heat" in the record) builds a variant, warms it up, times a few
steps and frees it with all compiled code, so that no variant lacks memory because of another. A
GPU lowers its clock under load, so trials cannot separate variants that are close; close
variants of one side are compared in alternating blocks (the run-off). The fastest variant of each
side is then built again, from the compiler's caches, and timed twice in this process: in blocks of
consecutive steps as in training, which is the result, and in interleaved samples that each start on
an idle GPU. The last variant tried stays built, because compiling a full model takes long even
from the caches. Finally the energy of each side is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from step_race.cases import StepRaceCase
from step_race.races import Heat, Racer
from stepscope.errors import first_cause, one_line
from stepscope.records.schema import Quantity
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.training.captured import forget_steps
from stepscope.training.flags import GRAPHS_OF_TORCH
from stepscope.training.transformer import TransformerStep

if TYPE_CHECKING:
    import torch

    from stepscope.measure.device import Device
    from stepscope.measure.timer import Timing

_WARM_UP = 3
_NEAR, _MAX_NEAR = 1.02, 3
"""Variants within this factor of the fastest trial of a side, at most this many, run off."""
_RUN_OFF_BLOCKS, _RUN_OFF_S = 4, 1.0
"""Blocks of a run-off, and their duration unless those of the result are shorter."""
_UNBROKEN_S = 4.0
"""Duration of consecutive steps for the energy measurement of a side, after warm-up."""
_MAX_COMPILATIONS = 64
"""Recompile limit: the same code is compiled for every variant, beyond the default limit of 8."""


class Entry(NamedTuple):
    """A variant that is ready to run."""

    racer: Racer
    step: TransformerStep


def measure(case: StepRaceCase, bench: Bench) -> Measurement:
    if any(racer.workload.compile != "no" for racer in case.racers):
        import torch._dynamo.config as dynamo

        dynamo.recompile_limit = _MAX_COMPILATIONS
    field = Field(case.racers[0], bench)
    began = time.monotonic()
    for index, racer in enumerate(case.racers):
        if time.monotonic() - began > case.heat_seconds:
            field.excluded[racer.name] = "not tried: the time limit for trials was reached"
            continue
        bench.progress(index, len(case.racers), f"trial of {racer.name}")
        field.heat(racer, case, last=index == len(case.racers) - 1)
    sides = list(field.heats)
    if {"baseline", "stepscope"} - set(sides):
        reasons = "; ".join(f"{name}: {why}" for name, why in field.excluded.items())
        raise CaseSkipped(f"nothing to compare: {reasons}")
    # PyTorch goes last: a variant of it may still be built, and rebuilding costs minutes.
    order = sorted(sides, key=lambda side: side == "baseline")
    fastest = {side: field.run_off(side, case.block_seconds) for side in order}
    entries = [field.entry(fastest[side]) for side in sides]
    blocks = _consecutive(
        entries, bench, "blocks of consecutive steps", case.blocks, case.block_seconds
    )
    samples = _interleaved(entries, bench, case)
    energy, no_energy = _energy(entries, bench)
    return Measurement(
        series=(*samples.series, *blocks.series),
        quantities=(*fastest["stepscope"].workload.quantities(), *energy),
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
    from step_race.consecutive import time_consecutive

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
    """Energy of each side in consecutive steps, or a note why it was not measured; the times of the
    race are valid without it."""
    from step_race.energy import energy_quantities, measure_energy

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
        energy += [msgspec.structs.replace(each, variant=racer.side) for each in quantities]
        reasons |= dict.fromkeys(why.values())
    return energy, {"no_energy": "; ".join(reasons)} if reasons else {}


def _begin_moments(optimizer: torch.optim.Optimizer) -> None:
    """Initialize moments of zero for every parameter, for other optimizers to adopt."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")
            }


class Field:
    """All variants of one step on the same weights."""

    def __init__(self, first: Racer, bench: Bench) -> None:
        self._bench = bench
        plain = msgspec.structs.replace(
            first.workload, compile="no", compile_mode="default", graph=False
        )
        self._owner = TransformerStep(plain, bench.device)
        _begin_moments(self._owner.optimizer)
        self.heats: dict[str, dict[str, Heat]] = {}
        """Trials by side and variant name."""
        self._racers: dict[str, Racer] = {}
        self._ready: dict[str, Entry] = {}
        self.excluded: dict[str, str] = {}
        """Reason why a variant did not run, by name."""
        self.no_run_off: dict[str, str] = {}
        """Reason why the variants of a side did not run off, by side."""

    def entry(self, racer: Racer) -> Entry:
        """Build a variant and run it once; drop its step state so that later captures are clean."""
        if racer.name in self._ready:
            return self._ready[racer.name]
        step = TransformerStep(racer.workload, self._bench.device, shares=self._owner)
        step.run()
        self._bench.device.synchronize()
        forget_steps(step)
        return Entry(racer, step)

    def heat(self, racer: Racer, case: StepRaceCase, *, last: bool = False) -> None:
        """Try one variant. The last of all stays built if it may be the fastest of its side."""
        from stepscope.measure.time_limit import TookTooLong, at_most

        try:
            with at_most(case.form_seconds):
                entry, heat = self._try(racer, case)
        except CaseSkipped as skipped:
            self.excluded[racer.name] = f"refused: {skipped}"
        except TookTooLong as late:
            self.excluded[racer.name] = f"given up: {late}"
        except Exception as error:
            self.excluded[racer.name] = f"failed: {one_line(error)}"
            # The traceback references the frames, which reference the tensors.
            del error
        else:
            self._note(racer, heat)
            if last and racer.name in {each.name for each in self.near(racer.side)}:
                forget_steps(entry.step)
                self._ready[racer.name] = entry
                self._bench.device.release()
                return
            del entry
        self._free(racer)

    def near(self, side: str) -> list[Racer]:
        """The fastest variant by its trial, and those within `_NEAR` of it."""
        heats = self.heats[side]
        order = sorted(heats, key=lambda name: heats[name].ms)
        max_ms = heats[order[0]].ms * _NEAR
        return [self._racers[name] for name in order[:_MAX_NEAR] if heats[name].ms <= max_ms]

    def run_off(self, side: str, block_seconds: float = _RUN_OFF_S) -> Racer:
        """Return the fastest variant of a side; close variants are timed in alternating blocks."""
        first, *others = near = self.near(side)
        if not others:
            return first
        try:
            fastest = self._alternate(near, min(_RUN_OFF_S, block_seconds))
        except Exception as error:
            self.no_run_off[side] = first_cause(error)
            fastest = first
        lost = [racer for racer in near if racer.name != fastest.name]
        ready = self._ready.get(fastest.name)
        for racer in near:
            self._ready.pop(racer.name, None)
        if ready and not any(racer.workload.compile_mode in GRAPHS_OF_TORCH for racer in lost):
            # Compiled code of the others is small; CUDA graphs of torch would keep their memory.
            self._ready[fastest.name] = ready
            self._bench.device.release()
            return fastest
        del ready
        for racer in near:
            self._free(racer)
        return fastest

    def _alternate(self, near: Sequence[Racer], seconds: float) -> Racer:
        entries = [self.entry(racer) for racer in near]
        timing = _consecutive(
            entries, self._bench, f"run-off of {near[0].side}", _RUN_OFF_BLOCKS, seconds
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
        allocated = device.allocated_bytes()
        device.reset_peak()
        entry = self.entry(racer)
        first_s = time.monotonic() - began
        _timed(entry, device, _WARM_UP, 0.0)
        samples = _timed(entry, device, case.heat_steps, case.steady_seconds)
        peak = device.peak_bytes()
        if allocated is None:
            # Without a tensor count there is only the resident set, which covers all variants.
            peak = None
        elif peak is not None:
            # Weights and moments were allocated before and count for this variant too.
            peak = peak - allocated + self._shared_bytes(entry.step)
        return entry, Heat(
            ms=statistics.median(samples),
            first_s=first_s,
            peak_bytes=None if peak is None else float(peak),
        )

    def _free(self, racer: Racer) -> None:
        """Free what a variant leaves: weight copies, compiled code, CUDA graphs of torch."""
        self._owner.optimizer.zero_grad(set_to_none=True)
        self._owner.model.copies.clear()  # type: ignore[union-attr,operator]
        if racer.workload.compile != "no":
            import torch._dynamo

            torch._dynamo.reset()
        self._bench.device.release()

    @staticmethod
    def _shared_bytes(step: TransformerStep) -> int:
        """Bytes of weights, buffers and moments."""
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
    from step_race.consecutive import consecutive_steps

    return consecutive_steps(entry.step.run, device, seconds, least)[1]
