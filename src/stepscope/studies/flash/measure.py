"""Measure a case of the flash study: a grid cell, or a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import one_line
from stepscope.records.schema import Quantity, Reading, Series
from stepscope.studies.attention.workload import (
    MODES,
    AttentionMode,
    AttentionStep,
    AttentionWorkload,
)
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.flash.accuracy import errors
from stepscope.studies.flash.cases import AttentionRaceCase, FlashCase, GridCase

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.measure.timer import Timing

_MAX_FLOPS_ON_A_CPU = 5e10
"""FLOPs per call: about one second on two cores."""
_YARDSTICK = "sdpa"
"""Implementation that allocates the tensors of a race; all others are variants of it."""


def measure(case: FlashCase, bench: Bench) -> Measurement:
    match case:
        case GridCase():
            return _measure_grid(case, bench)
        case AttentionRaceCase():
            return _measure_race(case, bench)


def _measure_grid(case: GridCase, bench: Bench) -> Measurement:
    """Measure three passes, memory, accuracy and the kernels that ran."""
    device = bench.device
    _refuse_long_on_a_cpu(case, device)
    allocated_before = device.allocated_bytes()
    step = AttentionStep(case, device)
    refusal = step.refusal()
    if refusal is not None:
        raise CaseSkipped(f"{case.attention}: {refusal}")
    # The first call compiles and creates the block mask: neither belongs to the peak of a step.
    step.results()
    device.synchronize()
    device.reset_peak()
    quantities = [*_flops(case), *_memory(step, allocated_before, device)]
    series: dict[AttentionMode, tuple[Series, ...]] = {}
    readings: list[Reading] = []
    for mode in MODES:
        timing = _time(step.variant(mode=mode), case, bench)
        series[mode] = _named(timing, mode)
        readings += timing.readings
    peak = device.peak_bytes()
    # Without a tensor count there is only the resident set, too coarse for one operation.
    if allocated_before is not None and peak is not None:
        quantities.append(Quantity(name="peak_bytes", value=peak - allocated_before, unit="B"))
    quantities += errors(step, device)
    return Measurement(
        series=(*series["both"], *series["forward"], *series["backward"]),
        quantities=tuple(quantities),
        readings=tuple(readings),
        attachments={"kernels": _kernels(step, device)},
    )


def _refuse_long_on_a_cpu(work: AttentionWorkload, device: Device) -> None:
    if device.kind == "cpu" and work.flops() > _MAX_FLOPS_ON_A_CPU:
        raise CaseSkipped(
            f"{work.flops() / 1e9:.0f} GFLOP per call: on a CPU this study is limited to"
            f" {_MAX_FLOPS_ON_A_CPU / 1e9:.0f}"
        )


def _kernels(step: AttentionStep, device: Device) -> dict[str, str]:
    """Names of the kernels of one forward and one backward pass; empty on a CPU."""
    from stepscope.measure.kernels import kernel_names, profile_kernels

    kernels = {}
    for mode in ("forward", "backward"):
        variant = step.variant(mode=mode)
        variant.reset()
        runs = profile_kernels(variant.run_phases, device)
        if runs is not None:
            kernels[mode] = kernel_names(runs)
    return kernels


def _flops(work: AttentionWorkload) -> tuple[Quantity, ...]:
    alone: tuple[AttentionMode, ...] = ("forward", "backward")
    passes = (
        Quantity(
            name="flops",
            phase=mode,
            value=msgspec.structs.replace(work, mode=mode).flops(),
            unit="FLOP",
        )
        for mode in alone
    )
    return (*work.quantities(), *passes)


def _memory(
    step: AttentionStep, allocated_before: int | None, device: Device
) -> tuple[Quantity, ...]:
    saved = step.saved_bytes()
    allocated = device.allocated_bytes()
    if saved is None or allocated is None or allocated_before is None:
        return ()
    return (
        Quantity(name="saved_bytes", value=saved, unit="B"),
        Quantity(name="input_bytes", value=allocated - allocated_before, unit="B"),
    )


def _time(step: AttentionStep, case: GridCase, bench: Bench) -> Timing:
    from stepscope.measure.timer import Phase, time_step

    return time_step(
        (Phase(step.workload.mode, step.run_phases),),
        bench.device,
        warmup=case.warmup,
        steps=case.steps,
        min_seconds=case.min_seconds,
        before=step.reset,
        progress=lambda done, total: bench.progress(done, total, step.workload.mode),
    )


def _named(timing: Timing, mode: str) -> tuple[Series, ...]:
    """Rename the series of a pass; on a GPU, the host clock measures its issue time."""
    by_name = {(series.name, series.clock): series for series in timing.series}
    on_device, issued = by_name.get(("step", "device")), by_name.get(("issue", "host"))
    chosen = (
        (by_name["step", "host"],) if on_device is None or issued is None else (on_device, issued)
    )
    return tuple(msgspec.structs.replace(series, name=mode) for series in chosen)


def _measure_race(case: AttentionRaceCase, bench: Bench) -> Measurement:
    """Time every implementation that supports the input, interleaved on the same tensors."""
    from stepscope.measure.interleaved import time_interleaved
    from stepscope.measure.kernels import kernel_names, profile_kernels

    device = bench.device
    work = case.workload(_YARDSTICK)
    _refuse_long_on_a_cpu(work, device)
    shared = AttentionStep(work, device, key_heads=case.key_heads, rule=case.rule)
    racers: dict[str, AttentionStep] = {}
    excluded: dict[str, str] = {}
    for name in case.racers:
        step = shared.variant(attention=name)
        reason = _first_call(step)
        if reason is None:
            racers[name] = step
        else:
            excluded[name] = reason
            device.release()
    if not racers:
        reasons = "; ".join(f"{name}: {why}" for name, why in excluded.items())
        broken = any(why.startswith("failed") for why in excluded.values())
        raise RuntimeError(reasons) if broken else CaseSkipped(reasons)
    timing = time_interleaved(
        {name: step.results for name, step in racers.items()},
        device,
        warmup=case.warmup,
        rounds=case.rounds,
        min_seconds=case.min_seconds,
        back_to_back=case.back_to_back,
        host_ahead=case.host_ahead,
        progress=lambda done, total: bench.progress(done, total, "rounds"),
    )
    kernels: dict[str, str] = {}
    # Profile last, and not where CPU time counts: a profiler can slow later launches.
    for name, step in racers.items() if not case.is_short else ():
        runs = profile_kernels(step.results, device)
        if runs is not None:
            kernels[name] = kernel_names(runs)
    return Measurement(
        series=timing.series,
        quantities=(Quantity(name="flops", value=shared.flops(), unit="FLOP"),),
        readings=timing.readings,
        notes={"auto": _choice(shared)} if "auto" in racers else {},
        attachments={"excluded": excluded, "kernels": kernels},
    )


def _first_call(step: AttentionStep) -> str | None:
    """Run the first call, which compiles; return why it failed, or None."""
    refusal = step.refusal()
    if refusal is not None:
        return f"refused: {refusal}"
    try:
        step.results()
    except Exception as error:
        return f"failed: {one_line(error)}"
    return None


def _choice(step: AttentionStep) -> str:
    from stepscope.attention import explain

    causal = step.workload.causal
    chosen = explain(step.q, step.k, step.v, is_causal=causal, rules=step.rules).chosen
    return f"takes {chosen}"
