"""Measures one case: compiled with an empty cache, timed in turns, compiled from a full one."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.acceleration.changes import blocks_of
from stepscope.records.decoding import from_json
from stepscope.records.schema import Clock, Quantity, Series
from stepscope.studies.attention.workload import AttentionStep
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.compile.cases import AttentionCase, ModelCase, TraceCase
from stepscope.studies.training.factory import make_step
from stepscope.studies.training.flags import GRAPHS_OF_TORCH

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.studies.training.subject import Subject

TimedCase = ModelCase | AttentionCase
CACHE = "TORCHINDUCTOR_CACHE_DIR"
_AGAIN_WITHIN_S = 900.0
_MOST_NAMED = 8
_EXPLAINED = "Explanation: "


class FirstStep(msgspec.Struct, frozen=True):
    """What a fresh process reports of its first step."""

    first_s: float


class StepVariant(NamedTuple):
    """One way to run the subject."""

    name: str
    step: Subject
    replays: bool = False
    """torch makes CUDA graphs of it."""


def eager_variant(case: TimedCase, device: Device) -> StepVariant:
    """The subject as it is."""
    if isinstance(case, AttentionCase):
        return StepVariant("eager", AttentionStep(case, device))
    return StepVariant("eager", make_step(msgspec.structs.replace(case, compile="no"), device))


def compiled_variant(case: TimedCase, device: Device, eager: StepVariant) -> StepVariant:
    """The same subject compiled, on the tensors of the eager one."""
    source: Any = eager.step
    if isinstance(case, AttentionCase):
        return StepVariant("compiled", source.variant(attention="compiled"))
    replays = device.kind == "cuda" and case.compile_mode in GRAPHS_OF_TORCH
    return StepVariant("compiled", make_step(case, device, shares=source), replays)


def load_compiler() -> float:
    """Seconds of it. Whatever else has used the compiler before decides whether they would be in a
    first step."""
    start = time.perf_counter()
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401

    return time.perf_counter() - start


def first_run_s(step: Subject, device: Device) -> float:
    """A first step, from the call until the device is done with it."""
    device.synchronize()
    start = time.perf_counter()
    step.run()
    device.synchronize()
    return time.perf_counter() - start


def measure_compile(case: TimedCase, bench: Bench) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="stepscope-compile-") as cache:
        os.environ[CACHE] = cache
        return _measure(case, bench)


def _measure(case: TimedCase, bench: Bench) -> Measurement:
    device = bench.device
    eager = eager_variant(case, device)
    # Twice: the first step also makes the optimizer's state and loads libraries.
    eager.step.run()
    eager.step.run()
    compiled = compiled_variant(case, device, eager)
    bench.progress(0, 3, "compiling")
    load_s = load_compiler()
    cold_s = first_run_s(compiled.step, device)
    for form in (eager, compiled):
        for _ in range(case.warmup):
            form.step.run()
    before = compilations()
    bench.progress(1, 3, "timing")
    series = _in_turns((eager, compiled), device, case.rounds, bench)
    # Not by their number: torch keeps the last so many of them.
    late = sum(all(one is not known for known in before) for one in compilations())
    quantities = [
        Quantity(name="load_s", value=load_s, unit="s"),
        Quantity(name="cold_s", value=cold_s, unit="s"),
        Quantity(name="recompiled_while_timed", value=late, unit="graphs"),
        *_counted(),
        *_memory((eager, compiled), device),
    ]
    notes: dict[str, str] = {}
    if case.warm:
        bench.progress(2, 3, "compiling again from the cache")
        del eager, compiled, form
        gc.collect()
        device.release()
        try:
            warm_s = _again(case, device)
            quantities.append(Quantity(name="warm_s", value=warm_s, unit="s"))
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            notes["warm"] = f"{type(error).__name__}: {error}"[:500]
    return Measurement(
        series=series, quantities=tuple(quantities), notes=notes, attachments=_named()
    )


def _again(case: TimedCase, device: Device) -> float:
    """The same first step in a process that has compiled nothing yet."""
    done = subprocess.run(
        [sys.executable, "-m", "stepscope.studies.compile.recompilation", device.kind],
        input=msgspec.json.encode(case),
        capture_output=True,
        timeout=_AGAIN_WITHIN_S,
        check=True,
    )
    for line in reversed(done.stdout.splitlines()):
        # A library may print after it.
        with suppress(msgspec.DecodeError):
            return from_json(line, FirstStep).first_s
    raise ValueError("the process did not report its time")


def _in_turns(
    forms: tuple[StepVariant, ...], device: Device, rounds: int, bench: Bench
) -> tuple[Series, ...]:
    """A step of each in every round; phases are marked in all of them."""
    from stepscope.measure.timer import time_step

    held: dict[tuple[str, str, Clock], list[float]] = {}
    for number in range(rounds):
        for form in forms if number % 2 == 0 else forms[::-1]:
            timing = time_step(
                form.step.phases(),
                device,
                warmup=0,
                steps=1,
                inner_marks="always",
                before=form.step.reset,
            )
            for one in timing.series:
                held.setdefault((form.name, one.name, one.clock), []).extend(one.values)
        bench.progress(number + 1, rounds, "rounds")
    order = {form.name: place for place, form in enumerate(forms)}
    return tuple(
        Series(name=name, variant=form, unit="ms", clock=clock, values=tuple(values))
        for (form, name, clock), values in sorted(held.items(), key=lambda item: order[item[0][0]])
    )


def _memory(forms: tuple[StepVariant, ...], device: Device) -> tuple[Quantity, ...]:
    """Of each form: what the forward leaves in use, and the peak of a step.

    A replayed graph allocates nothing, so what a step writes is then the memory that was set aside
    for it, as a whole: it is in the peak, and what the forward leaves of it is not known.
    """
    found: list[tuple[str, str, int]] = []
    for form in forms:
        form.step.reset()
        device.release()
        before = device.held_bytes()
        if before is None:
            return ()
        device.reset_peak()
        left = 0
        for phase in form.step.phases():
            if phase.name == "backward":
                left = (device.held_bytes() or 0) - before
            phase.run()
        device.synchronize()
        peak, replayed = device.peak_bytes() or 0, 0
        if form.replays:
            replayed = device.replayed_bytes()
        else:
            found.append(("before_backward", form.name, left))
        found.append(("peak_bytes", form.name, peak + replayed))
        form.step.reset()
    return tuple(
        Quantity(name=name, variant=form_name, value=size, unit="B")
        for name, form_name, size in found
    )


def measure_trace(case: TraceCase, bench: Bench) -> Measurement:
    """Torch's tracer alone: it finds graphs and breaks, and what it found runs as it is."""
    import torch

    step = make_step(msgspec.structs.replace(case, compile="no"), bench.device)
    for module in blocks_of(step.model) if case.compile == "block" else [step.model]:
        module.compile(backend="eager")
    first_s = first_run_s(step, bench.device)
    again_s = first_run_s(step, bench.device)
    if not torch._dynamo.utils.counters["stats"]:
        raise CaseSkipped("torch's tracer was not asked: is TORCHDYNAMO_DISABLE set?")
    return Measurement(
        series=(Series(name="first", unit="ms", values=(first_s * 1e3, again_s * 1e3)),),
        quantities=(
            Quantity(name="trace_s", value=first_s - again_s, unit="s"),
            *_counted(),
        ),
        attachments=_named(),
    )


def compilations() -> list[Any]:
    """What torch says of every frame that it has compiled in this process."""
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())


def _counted() -> tuple[Quantity, ...]:
    from torch._dynamo.utils import counters

    stats, again = counters["stats"], _recompiled()
    return (
        Quantity(name="graphs", value=stats.get("unique_graphs", 0), unit="graphs"),
        Quantity(name="operators", value=stats.get("calls_captured", 0), unit="operators"),
        Quantity(name="breaks", value=sum(counters["graph_break"].values()), unit="breaks"),
        Quantity(name="recompilations", value=len(again), unit="graphs"),
    )


def _recompiled() -> list[str]:
    return [
        _guard(str(reason))
        for one in compilations()
        if (reason := getattr(one, "recompile_reason", None))
    ]


def _guard(reason: str) -> str:
    """The guard that failed, without the code that asks for it, torch's advice and the stack."""
    first = reason.strip().splitlines()[0]
    return re.sub(r"^\d+/\d+: ", "", first).partition("  #")[0].strip()


def _cause(graph_break: str) -> str:
    """Torch's explanation, which names what it could not trace; else what it says first."""
    lines = [line.strip() for line in graph_break.strip().splitlines()]
    told = next((line for line in lines if line.startswith(_EXPLAINED)), lines[0])
    return told.removeprefix(_EXPLAINED)


def _named() -> dict[str, list[str]]:
    """Reasons of graph breaks and recompilations, the most frequent first."""
    from torch._dynamo.utils import counters

    breaks = counters["graph_break"].most_common(_MOST_NAMED)
    return {
        "breaks": [f"{times}× {_cause(str(reason))}" for reason, times in breaks],
        "recompiled": _recompiled()[:_MOST_NAMED],
    }
