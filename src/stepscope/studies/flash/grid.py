"""Measuring one cell of the grid: three passes, memory, accuracy, and which kernels ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.records.schema import Quantity, Reading, Series
from stepscope.studies.attention_workload import (
    MODES,
    AttentionMode,
    AttentionStep,
    AttentionWorkload,
)
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.flash.accuracy import errors
from stepscope.studies.flash.launches import launch_facts

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.measure.timer import Timing

_MOST_FLOPS_ON_A_CPU = 5e10
"""About a second a call on two cores."""


def measure_grid(config: dict[str, Any], bench: Bench) -> Measurement:
    work = msgspec.convert(config, AttentionWorkload)
    device = bench.device
    refuse_long_on_a_cpu(work, device)
    held_before = device.held_bytes()
    step = AttentionStep(work, device)
    refusal = step.refusal()
    if refusal is not None:
        raise CaseSkipped(f"{work.attention}: {refusal}")
    # The first call compiles, and a block mask is made once: neither is the peak of a step.
    step.results()
    device.synchronize()
    device.reset_peak()
    quantities = [*_flops(work), *_memory(step, held_before, device)]
    series: dict[AttentionMode, tuple[Series, ...]] = {}
    readings: list[Reading] = []
    for mode in MODES:
        timing = _time(step.variant(mode=mode), config, bench)
        series[mode] = _named(timing, mode)
        readings += timing.readings
    peak = device.peak_bytes()
    # Where tensors are not counted, the resident set is too coarse for one operation.
    if held_before is not None and peak is not None:
        quantities.append(Quantity(name="peak_bytes", value=peak - held_before, unit="B"))
    quantities += errors(step, device)
    if work.attention == "triton":
        quantities += launch_facts(step.results)
    return Measurement(
        series=(*series["both"], *series["forward"], *series["backward"]),
        quantities=tuple(quantities),
        readings=tuple(readings),
        attachments={"kernels": kernels_of(step, device)},
    )


def refuse_long_on_a_cpu(work: AttentionWorkload, device: Device) -> None:
    if device.kind == "cpu" and work.flops() > _MOST_FLOPS_ON_A_CPU:
        raise CaseSkipped(
            f"{work.flops() / 1e9:.0f} GFLOP a call: on a CPU this study stops at"
            f" {_MOST_FLOPS_ON_A_CPU / 1e9:.0f}"
        )


def kernels_of(step: AttentionStep, device: Device) -> dict[str, str]:
    """Names of the kernels of one forward and one backward; none on a CPU."""
    from stepscope.measure.kernels import kernel_names, profile_kernels

    kernels = {}
    for mode in ("forward", "backward"):
        one = step.variant(mode=mode)
        one.reset()
        runs = profile_kernels(one.run_phases, device)
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


def _memory(step: AttentionStep, held_before: int | None, device: Device) -> tuple[Quantity, ...]:
    saved = step.saved_bytes()
    held = device.held_bytes()
    if saved is None or held is None or held_before is None:
        return ()
    return (
        Quantity(name="saved_bytes", value=saved, unit="B"),
        Quantity(name="input_bytes", value=held - held_before, unit="B"),
    )


def _time(step: AttentionStep, config: dict[str, Any], bench: Bench) -> Timing:
    from stepscope.measure.timer import Phase, time_step

    return time_step(
        (Phase(step.workload.mode, step.run_phases),),
        bench.device,
        warmup=config["warmup"],
        steps=config["steps"],
        min_seconds=config["min_seconds"],
        before=step.reset,
        progress=lambda done, total: bench.progress(done, total, step.workload.mode),
    )


def _named(timing: Timing, mode: str) -> tuple[Series, ...]:
    """The pass by its name on both clocks: the host's, on a GPU, is the time to issue it."""
    held = {(series.name, series.clock): series for series in timing.series}
    on_device, issued = held.get(("step", "device")), held.get(("issue", "host"))
    chosen = (held["step", "host"],) if on_device is None or issued is None else (on_device, issued)
    return tuple(msgspec.structs.replace(series, name=mode) for series in chosen)
