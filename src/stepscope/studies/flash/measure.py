"""Measures the flash study: a cell of the grid, a race, the tiles of one of our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.attention.tiles import Pass, Tile, tiles
from stepscope.records.schema import Quantity, Reading, Series
from stepscope.studies.attention.workload import (
    MODES,
    AttentionMode,
    AttentionStep,
    AttentionWorkload,
)
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.flash.accuracy import errors
from stepscope.studies.flash.cases import CHOSEN, AttentionRaceCase, FlashCase, GridCase, TilesCase

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.measure.timer import Timing

_MOST_FLOPS_ON_A_CPU = 5e10
"""About a second a call on two cores."""
_YARDSTICK = "sdpa"
"""Names the tensors of a race; what races is a variant of it."""

Facts = dict[str, tuple[float, str]]
"""Values with their units."""


def measure_case(case: FlashCase, bench: Bench) -> Measurement:
    match case:
        case GridCase():
            return _measure_grid(case, bench)
        case AttentionRaceCase():
            return _measure_race(case, bench)
        case TilesCase():
            return _measure_tiles(case, bench)


def _measure_grid(case: GridCase, bench: Bench) -> Measurement:
    """Three passes, memory, accuracy, and which kernels ran."""
    device = bench.device
    _refuse_long_on_a_cpu(case, device)
    held_before = device.held_bytes()
    step = AttentionStep(case, device)
    refusal = step.refusal()
    if refusal is not None:
        raise CaseSkipped(f"{case.attention}: {refusal}")
    # The first call compiles, and a block mask is made once: neither is the peak of a step.
    step.results()
    device.synchronize()
    device.reset_peak()
    quantities = [*_flops(case), *_memory(step, held_before, device)]
    series: dict[AttentionMode, tuple[Series, ...]] = {}
    readings: list[Reading] = []
    for mode in MODES:
        timing = _time(step.variant(mode=mode), case, bench)
        series[mode] = _named(timing, mode)
        readings += timing.readings
    peak = device.peak_bytes()
    # Where tensors are not counted, the resident set is too coarse for one operation.
    if held_before is not None and peak is not None:
        quantities.append(Quantity(name="peak_bytes", value=peak - held_before, unit="B"))
    quantities += errors(step, device)
    if case.attention == "triton":
        quantities += launch_facts(step.results)
    return Measurement(
        series=(*series["both"], *series["forward"], *series["backward"]),
        quantities=tuple(quantities),
        readings=tuple(readings),
        attachments={"kernels": _kernels(step, device)},
    )


def _refuse_long_on_a_cpu(work: AttentionWorkload, device: Device) -> None:
    if device.kind == "cpu" and work.flops() > _MOST_FLOPS_ON_A_CPU:
        raise CaseSkipped(
            f"{work.flops() / 1e9:.0f} GFLOP a call: on a CPU this study stops at"
            f" {_MOST_FLOPS_ON_A_CPU / 1e9:.0f}"
        )


def _kernels(step: AttentionStep, device: Device) -> dict[str, str]:
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
    """The pass by its name on both clocks: the host's, on a GPU, is the time to issue it."""
    held = {(series.name, series.clock): series for series in timing.series}
    on_device, issued = held.get(("step", "device")), held.get(("issue", "host"))
    chosen = (held["step", "host"],) if on_device is None or issued is None else (on_device, issued)
    return tuple(msgspec.structs.replace(series, name=mode) for series in chosen)


def _measure_race(case: AttentionRaceCase, bench: Bench) -> Measurement:
    """Every implementation that takes the input, interleaved on the same tensors."""
    from stepscope.measure.interleaved import time_interleaved
    from stepscope.measure.kernels import kernel_names, profile_kernels

    device = bench.device
    work = case.workload(_YARDSTICK)
    _refuse_long_on_a_cpu(work, device)
    shared = AttentionStep(work, device)
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
        said = "; ".join(f"{name}: {why}" for name, why in excluded.items())
        broken = any(why.startswith("failed") for why in excluded.values())
        raise RuntimeError(said) if broken else CaseSkipped(said)
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
    # Afterwards, and not where the host's time counts: a profiler may leave launches slower.
    for name, step in racers.items() if not case.is_short else ():
        runs = profile_kernels(step.results, device)
        if runs is not None:
            kernels[name] = kernel_names(runs)
    return Measurement(
        series=timing.series,
        quantities=(Quantity(name="flops", value=work.flops(), unit="FLOP"),),
        readings=timing.readings,
        notes={"auto": _choice(shared)} if "auto" in racers else {},
        attachments={"excluded": excluded, "kernels": kernels},
    )


def _first_call(step: AttentionStep) -> str | None:
    """Compiles, and shows whether it runs at all: one that does not leaves the race to others."""
    refusal = step.refusal()
    if refusal is not None:
        return f"refused: {refusal}"
    try:
        step.results()
    except Exception as error:
        return f"failed: {_named_error(error)}"
    return None


def _choice(step: AttentionStep) -> str:
    from stepscope.attention import explain

    chosen = explain(step.q, step.k, step.v, is_causal=step.workload.causal).chosen
    return f"takes {chosen}"


def _measure_tiles(case: TilesCase, bench: Bench) -> Measurement:
    """Each tile is compiled, launched and timed, or does not fit.

    The other kernels of a call keep their own tiles; the profiler gives the time of this one alone.
    """
    if bench.device.kind != "cuda":
        raise CaseSkipped("tiles are those of a GPU kernel, and this is a CPU")
    import torch

    step = AttentionStep(case.workload("triton"), bench.device)
    capability = torch.cuda.get_device_capability(bench.device.torch_device)
    chosen = tiles(case.kernel, case.head, 2, capability)[0]
    # The limit on registers is part of the choice and not of the size.
    wanted = {CHOSEN: chosen} | {
        f"{m}x{n}": chosen._replace(m=m, n=n, warps=case.warps, registers=0)
        for m, n in product(case.tile_sizes, repeat=2)
    }
    processor = _processor(torch.cuda.get_device_properties(bench.device.torch_device))
    series: list[Series] = []
    quantities = [*_quantities("sm", processor)]
    refused: dict[str, str] = {}
    for done, (name, tile) in enumerate(wanted.items()):
        bench.progress(done, len(wanted), "tiles")
        found = measure_tile(case.kernel, tile, step.results, case.samples, bench)
        if isinstance(found, str):
            refused[name] = found
            continue
        times, facts = found
        series.append(Series(name="step", variant=name, unit="ms", values=times, clock="device"))
        quantities += _quantities(name, facts)
    return Measurement(
        series=tuple(series), quantities=tuple(quantities), attachments={"refused": refused}
    )


def measure_tile(
    which: Pass, tile: Tile, run: Callable[[], object], samples: int, bench: Bench
) -> tuple[tuple[float, ...], Facts] | str:
    """Times and compiler's facts of a tile, or why there are none.

    Fewer stages of the pipeline need less shared memory, so they are tried before giving up.
    """
    from triton.runtime.errors import OutOfResources

    from stepscope.attention.triton import launch as triton_launch
    from stepscope.measure.kernels import profile_kernels

    def repeat() -> None:
        for _ in range(samples):
            run()

    why = ""
    for stages in range(tile.stages, 0, -1):
        with triton_launch.forced_tiles({which: tile._replace(stages=stages)}):
            try:
                with triton_launch.recorded_launches() as launches:
                    run()
            except OutOfResources as error:
                why = f"does not fit: {error}"
                continue
            except Exception as error:
                # The compiler cannot lay out some tiles; the others are still measured.
                return f"does not compile: {_named_error(error)}"
            launch = next((held for held in launches if held.kind == which), None)
            if launch is None:
                return "was not launched"
            runs = profile_kernels(repeat, bench.device) or ()
        times = tuple(one.ms for one in runs if one.name == launch.kernel.name)
        if not times:
            return f"the profiler saw no {launch.kernel.name}"
        return times, _facts(launch)
    return why


def _named_error(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _processor(properties: Any) -> Facts:
    """The resources of one streaming multiprocessor, for all blocks that run on it at a time."""
    return {
        # Every GPU of the last ten years has 65536; not every torch has the attribute.
        "registers": (getattr(properties, "regs_per_multiprocessor", 65536), "registers"),
        "shared_bytes": (properties.shared_memory_per_multiprocessor, "B"),
        "threads": (properties.max_threads_per_multi_processor, "threads"),
        "count": (properties.multi_processor_count, "multiprocessors"),
    }


def launch_facts(run: Callable[[], object]) -> tuple[Quantity, ...]:
    """Tile and compiled size of each kernel that `run` launches; the variant is its pass."""
    from stepscope.attention.triton import launch as triton_launch

    with triton_launch.recorded_launches() as launches:
        run()
    facts = {one.kind: _facts(one) for one in launches}
    return tuple(one for kind, held in facts.items() for one in _quantities(kind, held))


def _facts(launch: Any) -> Facts:
    """The delta kernel has rows and no tile; Triton's interpreter compiles nothing."""
    facts: Facts = {}
    tile, kernel = launch.tile, launch.kernel
    if tile is not None:
        facts |= {
            "tile_m": (tile.m, "rows"),
            "tile_n": (tile.n, "rows"),
            "warps": (tile.warps, "warps"),
            "stages": (tile.stages, "stages"),
        }
    if kernel is not None:
        facts |= {
            "registers": (kernel.n_regs, "registers"),
            "spills": (kernel.n_spills, "registers"),
            "shared_bytes": (kernel.metadata.shared, "B"),
        }
    return facts


def _quantities(variant: str, facts: Facts) -> Iterator[Quantity]:
    for name, (value, unit) in facts.items():
        yield Quantity(name=name, variant=variant, value=value, unit=unit)
