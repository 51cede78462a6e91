"""Measuring a race: every implementation that takes the input, in turns on the same tensors."""

from __future__ import annotations

from typing import Any

from stepscope.records.schema import Quantity
from stepscope.studies.attention_workload import AttentionStep
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.flash.cases import is_short, shape_of
from stepscope.studies.flash.grid import refuse_long_on_a_cpu

_YARDSTICK = "sdpa"
"""Names the tensors; what races is a variant of it."""


def measure_race(config: dict[str, Any], bench: Bench) -> Measurement:
    from stepscope.measure.kernels import kernel_names, profile_kernels
    from stepscope.measure.turns import time_in_turns

    device = bench.device
    shape = shape_of(config)
    work = shape.workload(_YARDSTICK)
    refuse_long_on_a_cpu(work, device)
    shared = AttentionStep(work, device)
    racers: dict[str, AttentionStep] = {}
    excluded: dict[str, str] = {}
    for name in config["racers"]:
        step = shared.variant(attention=name)
        reason = _first_call(step)
        if reason is not None:
            excluded[name] = reason
            device.release()
            continue
        racers[name] = step
    if not racers:
        said = "; ".join(f"{name}: {why}" for name, why in excluded.items())
        broken = any(why.startswith("failed") for why in excluded.values())
        raise RuntimeError(said) if broken else CaseSkipped(said)
    notes = {"auto": _choice(shared)} if "auto" in racers else {}
    kernels: dict[str, str] = {}
    timing = time_in_turns(
        {name: step.results for name, step in racers.items()},
        device,
        warmup=config["warmup"],
        rounds=config["rounds"],
        min_seconds=config["min_seconds"],
        back_to_back=config["back_to_back"],
        host_ahead=config["host_ahead"],
        progress=lambda done, total: bench.progress(done, total, "rounds"),
    )
    # Afterwards, and not where the host's time counts: a profiler may leave launches slower.
    for name, step in racers.items() if not is_short(shape) else ():
        runs = profile_kernels(step.results, device)
        if runs is not None:
            kernels[name] = kernel_names(runs)
    return Measurement(
        series=timing.series,
        quantities=(Quantity(name="flops", value=work.flops(), unit="FLOP"),),
        readings=timing.readings,
        notes=notes,
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
        said = (str(error).strip().splitlines() or [""])[0]
        return f"failed: {type(error).__name__}: {said}"
    return None


def _choice(step: AttentionStep) -> str:
    from stepscope.attention import explain

    chosen = explain(step.q, step.k, step.v, is_causal=step.workload.causal).chosen
    return f"takes {chosen}"
