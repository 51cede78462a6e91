"""Records of the step study and the compile study with times chosen by a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from energy_parts import (
    ATTENTION,
    BASELINE_MATMULS,
    FULL_STEP,
    GEMMS,
    PASSES,
    UPDATES,
)
from step_loss.cases import LossFlags, loss_cases
from step_race.cases import RaceFlags, StepRaceCase, race_cases
from step_race.energy import Energy, energy_quantities

from sample_records import planted, times
from stepscope.analysis.trace.summarize import summarize
from stepscope.records.schema import Ceiling, Quantity, Record, Series
from stepscope.studies.compile.cases import CompileFlags
from stepscope.studies.registry import find_study
from stepscope.studies.step.cases import StepCase, StepFlags
from trace_files import training_step

CEILINGS = (
    *(
        Ceiling(name=f"matmul.{dtype}", value=rate, unit="FLOP/s", source="measured")
        for dtype, rate in {"float32": 50e12, "tf32": 400e12, "bfloat16": 780e12}.items()
    ),
    Ceiling(name="memory.copy", value=4.3e12, unit="B/s", source="measured"),
)


def _cases(part: str, **flags: Any) -> tuple[Any, ...]:
    return find_study("step").cases(StepFlags(part=(part,), **flags))  # type: ignore[arg-type]


def _record(case: StepCase, changes: dict[str, Any], **parts: Any) -> Record:
    return planted("step", case, changes, known={"ceilings": CEILINGS}, **parts)


def rung_record(
    rung: str = "start",
    how: str = "start",
    *,
    step: float = 100.0,
    size: str = "small",
    **changes: Any,
) -> Record:
    """A rung with a step time of `step` ms."""
    (case,) = (c for c in _cases("ladder", size=(size,)) if (c.rung, c.how) == (rung, how))
    return _record(case, changes, series=(times("step", step), times("step", step, "host")))


def loss_record(rung: str, seed: int, losses: Sequence[float], **changes: Any) -> Record:
    case = next(c for c in loss_cases(LossFlags(seeds=(seed,))) if c.rung == rung)
    series = (Series(name="loss", unit="nats", values=tuple(losses)),)
    return planted("step-loss", case, changes, known={"ceilings": CEILINGS}, series=series)


def waterfall_record(
    rung: str = "start", *, step: float = 1.0, replay: float | None = None, **changes: Any
) -> Record:
    (case,) = (c for c in _cases("waterfall") if c.rung == rung)
    series = [times("step", step), times("step", step, "host")]
    series += [times("replay", replay)] if replay is not None else []
    return _record(
        case,
        changes,
        series=tuple(series),
        attachments={"profile": msgspec.to_builtins(summarize(training_step().read()))},
    )


def step_race_record(
    name: str = "2.7b-512",
    took: Mapping[str, float] | None = None,
    *,
    peaks: Mapping[str, float] | None = None,
    drawn: Mapping[str, tuple[float, float, float]] | None = None,
    consecutive: Mapping[str, Sequence[float]] | None = None,
    **changes: Any,
) -> Record:
    """A race with these interleaved times in ms by variant, and peaks by side in GiB.

    `drawn` has the watts, ms and MHz of the energy measurement by side; `consecutive` the median
    step of each block by side.
    """
    (case,) = race_cases(RaceFlags(race=(name,)))
    took = took or {
        "baseline: block default sdpa_flash": 100.0,
        "stepscope: model default auto": 80.0,
    }
    best, heats = {}, {}
    for racer, ms in took.items():
        side = racer.partition(":")[0]
        best[side] = racer
        peak = (peaks or {}).get(side, 50.0) * 2**30
        heats[racer] = {"ms": ms, "first_s": 10.0, "peak_bytes": peak}
    quantities = [Quantity(name="flops", value=28e12, unit="FLOP")]
    for side, (watts, ms, mhz) in (drawn or {}).items():
        energy = Energy(watts * ms * 1e-3, watts, ms, mhz, 25, 0.5)
        measured, _ = energy_quantities(energy, None)
        quantities += [msgspec.structs.replace(one, variant=side) for one in measured]
    blocks = tuple(
        Series(
            name="consecutive", variant=best[side], unit="ms", clock="device", values=tuple(steps)
        )
        for side, steps in (consecutive or {}).items()
    )
    samples = tuple(times("step", ms, variant=racer) for racer, ms in took.items())
    attachments = {
        "best": best,
        "heats": heats,
        "excluded": {"baseline: model max-autotune sdpa_cudnn": "failed: OutOfMemoryError: full"},
    }
    return planted(
        "step-race",
        case,
        changes,
        known={"ceilings": CEILINGS},
        series=(*samples, *blocks),
        attachments=attachments,
        quantities=tuple(quantities),
    )


def tiny_race_case(**changes: Any) -> StepRaceCase:
    """A race that takes seconds on a CPU."""
    (case,) = race_cases(
        RaceFlags(race=("tiny-64",), rounds=2, min_seconds=0.0, blocks=2, block_seconds=0.0)
    )
    small = {"context": 8, "batch": 1, "overrides": {"vocab": 32}}
    racers = tuple(
        racer._replace(workload=msgspec.structs.replace(racer.workload, **small))
        for racer in case.racers
    )
    return msgspec.structs.replace(case, racers=racers, **{"steady_seconds": 0.0} | changes)


def compile_record(
    kind: str = "model",
    *,
    eager: float = 30.0,
    compiled: float = 20.0,
    cold_s: float = 10.0,
    warm_s: float | None = None,
    extra: Mapping[str, float] | None = None,
    **changes: Any,
) -> Record:
    """A case of the compile study with these step times in ms, a third of them forward.

    `extra` has further quantities by name.
    """
    flags = CompileFlags(
        part=(kind,), compile=("block",), attention_context=(1024,), head_dim=(64,)
    )  # type: ignore[arg-type]
    (case,) = find_study("compile").cases(flags)
    values = {"cold_s": cold_s, "graphs": 2, "operators": 100, "breaks": 0, "recompilations": 0}
    values |= {"recompiled_while_timed": 0} | dict(extra or {})
    values |= {} if warm_s is None else {"warm_s": warm_s}
    sizes = {
        "eager": {"before_backward": 4e9, "peak_bytes": 8e9},
        "compiled": {"before_backward": 3e9, "peak_bytes": 6e9},
    }
    memory = (
        Quantity(name=name, variant=variant, value=size, unit="B")
        for variant, by_name in sizes.items()
        for name, size in by_name.items()
    )
    shares = {"step": 1.0, "forward": 0.3, "backward": 0.6}
    return planted(
        "compile",
        case,
        changes,
        series=tuple(
            times(phase, ms * share, variant=variant)
            for variant, ms in {"eager": eager, "compiled": compiled}.items()
            for phase, share in shares.items()
        ),
        quantities=(
            *(Quantity(name=name, value=v, unit="1") for name, v in values.items()),
            *memory,
        ),
    )


def energy_lines() -> list[dict[str, Any]]:
    """Energy of the parts of one step, as written by `benchmarks/energy_by_part.py`."""
    parts = {
        GEMMS: (40.0, 20.0, 2.8e13), ATTENTION: (4.0, 2.5, None), UPDATES: (15.0, 15.0, None),
        PASSES: (5.0, 2.5, None), BASELINE_MATMULS: (50.0, 25.0, 2.8e13),
        FULL_STEP: (60.0, 40.0, None),
    }  # fmt: skip
    return [
        {"race": "xl-512", "form": "eager auto", "layers": 48, "of_layers": 48, "part": part,
         "ms": ms, "joules": joules, "resolution": 0.25, "sm_clock_mhz": 1700.0, "runs": 30,
         "flops": flops, "scaled": 1.0, "device": "H200", "torch": "2.11", "commit": "ab",
         "power_limit_w": 500.0}
        for part, (ms, joules, flops) in parts.items()
    ]  # fmt: skip
