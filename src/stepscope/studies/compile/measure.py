"""Measure one case: compile with an empty cache, time interleaved, compile from a filled cache."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.acceleration.changes import blocks_of
from stepscope.processes import own_command
from stepscope.records.decoding import from_json
from stepscope.records.schema import Clock, Quantity, Series
from stepscope.studies.attention.workload import AttentionStep
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.compile.cases import AttentionCase, CompileCase, ModelCase, TraceCase
from stepscope.training.factory import make_step
from stepscope.training.flags import GRAPHS_OF_TORCH

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.training.subject import Subject

TimedCase = ModelCase | AttentionCase
CACHE = "TORCHINDUCTOR_CACHE_DIR"
_WARM_TIMEOUT_S = 900.0
_MAX_REASONS = 8
_EXPLAINED = "Explanation: "


class FirstStep(msgspec.Struct, frozen=True):
    """Report of a fresh process about its first step."""

    first_s: float


class StepVariant(NamedTuple):
    """The subject, eager or compiled."""

    name: str
    step: Subject
    replays: bool = False
    """True if torch replays it as CUDA graphs."""


def eager_variant(case: TimedCase, device: Device) -> StepVariant:
    """The subject without compilation."""
    if isinstance(case, AttentionCase):
        return StepVariant("eager", AttentionStep(case, device))
    return StepVariant("eager", make_step(msgspec.structs.replace(case, compile="no"), device))


def compiled_variant(case: TimedCase, device: Device, eager: StepVariant) -> StepVariant:
    """The same subject compiled, sharing the tensors of the eager one."""
    source: Any = eager.step
    if isinstance(case, AttentionCase):
        return StepVariant("compiled", source.variant(attention="compiled"))
    replays = device.kind == "cuda" and case.compile_mode in GRAPHS_OF_TORCH
    return StepVariant("compiled", make_step(case, device, shares=source), replays)


def load_compiler() -> float:
    """Import the compiler and return the seconds it takes; loading it first keeps this time out of
    the first step, where it would depend on what ran before."""
    start = time.perf_counter()
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401

    return time.perf_counter() - start


def first_run_s(step: Subject, device: Device) -> float:
    """Seconds of a first step, until the GPU has finished it."""
    device.synchronize()
    start = time.perf_counter()
    step.run()
    device.synchronize()
    return time.perf_counter() - start


def measure(case: CompileCase, bench: Bench) -> Measurement:
    return (
        measure_trace(case, bench) if isinstance(case, TraceCase) else measure_compile(case, bench)
    )


def measure_compile(case: TimedCase, bench: Bench) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="stepscope-compile-") as cache:
        os.environ[CACHE] = cache
        return _measure(case, bench)


def _measure(case: TimedCase, bench: Bench) -> Measurement:
    device = bench.device
    eager = eager_variant(case, device)
    # Twice: the first step also creates the optimizer state and loads libraries.
    eager.step.run()
    eager.step.run()
    compiled = compiled_variant(case, device, eager)
    bench.progress(0, 3, "compiling")
    load_s = load_compiler()
    cold_s = first_run_s(compiled.step, device)
    for variant in (eager, compiled):
        for _ in range(case.warmup):
            variant.step.run()
    before = compilations()
    bench.progress(1, 3, "timing")
    series = _time_interleaved((eager, compiled), device, case.rounds, bench)
    # Compared by identity, not by count: torch keeps only the most recent entries.
    late = sum(all(new is not known for known in before) for new in compilations())
    quantities = [
        Quantity(name="load_s", value=load_s, unit="s"),
        Quantity(name="cold_s", value=cold_s, unit="s"),
        Quantity(name="recompiled_while_timed", value=late, unit="graphs"),
        *_graph_counts(),
        *_memory((eager, compiled), device),
    ]
    notes: dict[str, str] = {}
    if case.warm:
        bench.progress(2, 3, "compiling again from the cache")
        del eager, compiled, variant
        gc.collect()
        device.release()
        try:
            warm_s = _warm_start_s(case, device)
            quantities.append(Quantity(name="warm_s", value=warm_s, unit="s"))
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            notes["warm"] = f"{type(error).__name__}: {error}"[:500]
    return Measurement(
        series=series, quantities=tuple(quantities), notes=notes, attachments=_reasons()
    )


def _warm_start_s(case: TimedCase, device: Device) -> float:
    """Seconds of the same first step in a fresh process, from the filled cache."""
    done = subprocess.run(
        own_command("stepscope.studies.compile.recompilation", device.kind),
        input=msgspec.json.encode(case),
        capture_output=True,
        timeout=_WARM_TIMEOUT_S,
        check=True,
    )
    for line in reversed(done.stdout.splitlines()):
        # A library may print after the report.
        with suppress(msgspec.DecodeError):
            return from_json(line, FirstStep).first_s
    raise ValueError("the process did not report its time")


def _time_interleaved(
    variants: tuple[StepVariant, ...], device: Device, rounds: int, bench: Bench
) -> tuple[Series, ...]:
    """Time one step of each variant per round; phases are marked in all of them."""
    from stepscope.measure.timer import time_step

    samples: dict[tuple[str, str, Clock], list[float]] = {}
    for index in range(rounds):
        for variant in variants if index % 2 == 0 else variants[::-1]:
            timing = time_step(
                variant.step.phases(),
                device,
                warmup=0,
                steps=1,
                inner_marks="always",
                before=variant.step.reset,
            )
            for series in timing.series:
                key = (variant.name, series.name, series.clock)
                samples.setdefault(key, []).extend(series.values)
        bench.progress(index + 1, rounds, "rounds")
    order = {variant.name: index for index, variant in enumerate(variants)}
    return tuple(
        Series(name=name, variant=variant_name, unit="ms", clock=clock, values=tuple(values))
        for (variant_name, name, clock), values in sorted(
            samples.items(), key=lambda item: order[item[0][0]]
        )
    )


def _memory(variants: tuple[StepVariant, ...], device: Device) -> tuple[Quantity, ...]:
    """Bytes saved for backward and peak of a step, for each variant.

    A replayed CUDA graph allocates nothing: the peak then includes the full memory pool of the
    graph, and the bytes saved for backward are unknown.
    """
    sizes: list[tuple[str, str, int]] = []
    for variant in variants:
        variant.step.reset()
        device.release()
        before = device.allocated_bytes()
        if before is None:
            return ()
        device.reset_peak()
        left = 0
        for phase in variant.step.phases():
            if phase.name == "backward":
                left = (device.allocated_bytes() or 0) - before
            phase.run()
        device.synchronize()
        peak, replayed = device.peak_bytes() or 0, 0
        if variant.replays:
            replayed = device.replayed_bytes()
        else:
            sizes.append(("before_backward", variant.name, left))
        sizes.append(("peak_bytes", variant.name, peak + replayed))
        variant.step.reset()
    return tuple(
        Quantity(name=name, variant=variant_name, value=size, unit="B")
        for name, variant_name, size in sizes
    )


def measure_trace(case: TraceCase, bench: Bench) -> Measurement:
    """Run TorchDynamo alone: it captures graphs and breaks, and the graphs run eagerly."""
    import torch

    step = make_step(msgspec.structs.replace(case, compile="no"), bench.device)
    for module in blocks_of(step.model) if case.compile == "block" else [step.model]:
        module.compile(backend="eager")
    first_s = first_run_s(step, bench.device)
    again_s = first_run_s(step, bench.device)
    if not torch._dynamo.utils.counters["stats"]:
        raise CaseSkipped("TorchDynamo did not run: is TORCHDYNAMO_DISABLE set?")
    return Measurement(
        series=(Series(name="first", unit="ms", values=(first_s * 1e3, again_s * 1e3)),),
        quantities=(
            Quantity(name="trace_s", value=first_s - again_s, unit="s"),
            *_graph_counts(),
        ),
        attachments=_reasons(),
    )


def compilations() -> list[Any]:
    """Compilation metrics of every frame that torch has compiled in this process."""
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())


def _graph_counts() -> tuple[Quantity, ...]:
    from torch._dynamo.utils import counters

    stats, recompiled = counters["stats"], _recompiled()
    return (
        Quantity(name="graphs", value=stats.get("unique_graphs", 0), unit="graphs"),
        Quantity(name="operators", value=stats.get("calls_captured", 0), unit="operators"),
        Quantity(name="breaks", value=sum(counters["graph_break"].values()), unit="breaks"),
        Quantity(name="recompilations", value=len(recompiled), unit="graphs"),
    )


def _recompiled() -> list[str]:
    return [
        _guard(str(reason))
        for metrics in compilations()
        if (reason := getattr(metrics, "recompile_reason", None))
    ]


def _guard(reason: str) -> str:
    """The failed guard, without its source code, torch's hints and the stack."""
    first = reason.strip().splitlines()[0]
    return re.sub(r"^\d+/\d+: ", "", first).partition("  #")[0].strip()


def _cause(graph_break: str) -> str:
    """Torch's explanation of what it could not trace, else the first line of its message."""
    lines = [line.strip() for line in graph_break.strip().splitlines()]
    line = next((line for line in lines if line.startswith(_EXPLAINED)), lines[0])
    return line.removeprefix(_EXPLAINED)


def _reasons() -> dict[str, list[str]]:
    """Reasons of graph breaks and recompilations, most frequent first."""
    from torch._dynamo.utils import counters

    breaks = counters["graph_break"].most_common(_MAX_REASONS)
    return {
        "breaks": [f"{times}× {_cause(str(reason))}" for reason, times in breaks],
        "recompiled": _recompiled()[:_MAX_REASONS],
    }
