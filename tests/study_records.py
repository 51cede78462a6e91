"""Records of the studies for their own cases, with times that a test chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sample_records import environment, merged, planted, times
from stepscope.analysis.trace.summarize import summarize
from stepscope.model.config import precision
from stepscope.records.memory import PARAMETERS, SAVED, PhasePeak, Point, SavedTensor
from stepscope.records.schema import Ceiling, Clock, Quantity, Record, Series
from stepscope.studies.attention.workload import RESULTS
from stepscope.studies.registry import find_study
from trace_files import ChromeTrace, operator_step, training_step


def matrix_ceiling(dtype: str, value: float) -> Ceiling:
    return Ceiling(name=f"matmul.{dtype}", value=value, unit="FLOP/s", source="measured")


def benchmark_record(
    mode: str = "train-step",
    *,
    size: str = "small",
    context: int = 512,
    dtype: str = "float32",
    step: float = 100.0,
    phases: dict[str, float] | None = None,
    issue_share: float = 0.4,
    ceiling: float = 50e12,
    flops: float = 1e12,
    **changes: Any,
) -> Record:
    """One mode of one training step; the host issues it in `issue_share` of its time."""
    study = find_study("benchmark")
    flags = study.flags(size=(size,), context=(context,), dtype=(dtype,), mode=(mode,))
    (case,) = study.cases(flags)
    named = {"step": step} | (phases or {})
    series = [times(name, value, "host") for name, value in named.items()]
    if changes.get("environment", environment()).device_kind == "cuda":
        on_host = {name: value * issue_share for name, value in (phases or {}).items()}
        series = [times(name, value) for name, value in named.items()]
        series += [times(name, value, "host") for name, value in on_host.items()]
        series += [times("step", step, "host"), times("issue", step * issue_share, "host")]
    return planted(
        "benchmark",
        case,
        changes,
        known={
            "quantities": (Quantity(name="flops", value=flops, unit="FLOP"),),
            "ceilings": (matrix_ceiling(precision(dtype).compute, ceiling),),
        },
        series=tuple(series),
    )


def warmup_record(steps: Sequence[float], warmup: int = 0, **changes: Any) -> Record:
    """One fresh process with these step times, the first `warmup` of them left out."""
    study = find_study("warmup")
    counted = max(4, len(steps) - warmup)
    (case,) = study.cases(study.flags(warmup=(warmup,), steps=counted, context=(256,)))
    series = tuple(
        Series(name=name, unit="ms", values=tuple(steps[warmup:]), warmup=tuple(steps[:warmup]))
        for name in ("step", "forward", "backward")
    )
    return planted(
        "warmup",
        case,
        changes,
        known={
            "quantities": (Quantity(name="flops", value=1e12, unit="FLOP"),),
            "ceilings": (matrix_ceiling("float32", 50e12),),
        },
        series=series,
    )


def profile_record(
    mode: str = "train-step",
    *,
    size: str = "small",
    context: int = 512,
    dtype: str = "float32",
    batch: int = 4,
    step: float = 1.0,
    trace: ChromeTrace | None = None,
    experiments: dict[str, float] | None = None,
    **changes: Any,
) -> Record:
    """One mode of one training step that took `step` ms, with the summary of that trace."""
    study = find_study("profile")
    flags = study.flags(
        size=(size,), context=(context,), dtype=(dtype,), batch=(batch,), mode=(mode,)
    )
    (case,) = study.cases(flags)
    on_cpu = changes.get("environment", environment()).device_kind == "cpu"
    if trace is None:
        trace = operator_step() if on_cpu else training_step(blocks=2)
    clock: Clock = "host" if on_cpu else "device"
    phases = {"forward": 0.3, "backward": 0.5} if mode != "forward" else {}
    series = [times("step", step, "host"), times("step", step, clock)]
    series += [times(name, step * share, clock) for name, share in phases.items()]
    series += [times(name, ms, clock) for name, ms in (experiments or {}).items()]
    return planted(
        "profile",
        case,
        changes,
        known={
            "ceilings": (
                matrix_ceiling("float32", 50e12),
                Ceiling(name="memory.copy", value=4e12, unit="B/s", source="measured"),
            )
        },
        series=tuple(series),
        attachments={"profile": msgspec.to_builtins(summarize(trace.read()))},
    )


def memory_record(
    mode: str = "train-step",
    *,
    size: str = "tiny",
    context: int = 128,
    dtype: str = "float32",
    attention: str = "reference",
    peak: int = 1000 << 20,
    lines: Mapping[str, int] | None = None,
    saved: Sequence[SavedTensor] = (),
    extra: Sequence[Quantity] = (),
    **changes: Any,
) -> Record:
    """One step whose phases all peak at `peak` bytes, on these lines."""
    study = find_study("memory")
    flags = study.flags(
        size=(size,), context=(context,), dtype=(dtype,), attention=(attention,), mode=(mode,)
    )
    (case,) = study.cases(flags)
    lines = {PARAMETERS: peak // 2, f"{SAVED}attention, softmax": peak // 2} | dict(lines or {})
    names = ("forward",) if mode == "forward" else ("forward", "loss", "backward", "optimizer")
    phases = [
        PhasePeak(phase=name, allocated=peak, lines=dict(lines), operator="aten.mm.default")
        for name in names
    ]
    values = {"peak_bytes": peak, "predicted_bytes": 1.01 * peak, "largest_bytes": peak / 4}
    if changes.get("environment", environment()).device_kind == "cuda":
        on_device = {"context_bytes": 1 << 29, "reserved_bytes": peak + (1 << 28)}
        values = on_device | {"driver_bytes": peak + (1 << 28) + (1 << 29)} | values
    return planted(
        "memory",
        case,
        changes,
        known={
            "quantities": merged(
                (Quantity(name=name, value=value, unit="B") for name, value in values.items()),
                (Quantity(name="peak_bytes", phase=name, value=peak, unit="B") for name in names),
                extra,
            )
        },
        series=(times("step", 10.0, "host"), times("recorded", 20.0)),
        notes={"largest": "aten.bmm.default at reference.py:31"},
        attachments=msgspec.to_builtins(
            {
                "ledger": phases,
                "saved": saved,
                "course": [
                    Point(phase=name, operator=10 * index, kinds={PARAMETERS: peak // index})
                    for index, name in enumerate(names, start=1)
                ],
            }
        ),
    )


def checkpointing_record(
    strategy: str = "no",
    *,
    peak: int = 1000 << 20,
    step: float = 10.0,
    layers: int = 8,
    extra: Sequence[Quantity] = (),
    **changes: Any,
) -> Record:
    """One strategy of a step of `layers` blocks, with its peak in the backward."""
    study = find_study("checkpointing")
    flags = study.flags(size=("tiny",), context=(128,), layers=layers, checkpoint=(strategy,))
    case = study.cases(flags)[-1]
    peaks = {"": peak, "forward": 0.5 * peak, "loss": 0.6 * peak, "backward": peak}
    return planted(
        "checkpointing",
        case,
        changes,
        series=(times("step", step),),
        quantities=merged(
            (
                Quantity(name="peak_bytes", phase=phase, value=at, unit="B")
                for phase, at in peaks.items()
            ),
            (Quantity(name="predicted_bytes", value=1.01 * peak, unit="B"),),
            extra,
        ),
        notes={"strategy": strategy},
    )


def attention_record(
    mode: str = "forward",
    *,
    seq: int = 1024,
    head: int = 64,
    step: float = 10.0,
    attention: str = "reference",
    saved: float | None = None,
    peak: float | None = None,
    **changes: Any,
) -> Record:
    """One pass of one attention with this time, which left `saved` bytes in use."""
    study = find_study("attention")
    flags = study.flags(context=(seq,), head_dim=(head,), attention=(attention,))
    (case,) = (c for c in study.cases(flags) if c.mode == mode)
    quantities = list(case.quantities())
    if saved is not None:
        quantities.append(Quantity(name="saved_bytes", value=saved, unit="B"))
    if peak is not None:
        quantities.append(Quantity(name="peak_bytes", value=peak, unit="B"))
    series = (times("step", step), times("step", step, "host"), times("issue", step / 4, "host"))
    return planted(
        "attention",
        case,
        changes,
        known={"ceilings": (matrix_ceiling("float32", 50e12),)},
        series=series,
        quantities=tuple(quantities),
    )


def flash_record(
    attention: str = "triton",
    *,
    seq: int = 4096,
    head: int = 64,
    dtype: str = "bfloat16",
    shape: str | None = None,
    both: float = 1.0,
    issued: float | None = None,
    peak: float | None = None,
    error: float | None = None,
    registers: int | None = None,
    **changes: Any,
) -> Record:
    """One cell of the grid that took `both` ms, a third of it forward, `issued` for that long.

    `error` is that of every result in units of the reference's; `registers` those of our kernels.
    """
    study = find_study("flash")
    flags = study.flags(
        part=("grid",),
        attention=(attention,),
        dtype=(dtype,),
        head_dim=(head,),
        context=() if shape else (seq,),
        shape=(shape,) if shape else (),
    )
    (case,) = study.cases(flags)
    quantities = [
        *case.quantities(),
        *(
            Quantity(
                name="flops",
                phase=mode,
                value=msgspec.structs.replace(case, mode=mode).flops(),
                unit="FLOP",
            )
            for mode in ("forward", "backward")
        ),
    ]
    if peak is not None:
        quantities.append(Quantity(name="peak_bytes", value=peak, unit="B"))
    if error is not None:
        errors = {"error": 1e-3 * error, "reference_error": 1e-3, "last_place": 1e-5}
        quantities += [
            Quantity(name=name, variant=result, value=value, unit="1")
            for result in RESULTS
            for name, value in errors.items()
        ]
    for kernel in ("forward", "key_value", "query") if registers is not None else ():
        facts = {
            "tile_m": 64,
            "tile_n": 128,
            "warps": 4,
            "stages": 3,
            "registers": registers,
            "spills": 0,
            "shared_bytes": 98304,
        }
        quantities += [
            Quantity(name=name, variant=kernel, value=value or 0, unit="1")
            for name, value in facts.items()
        ]
    took = {"both": both, "forward": both / 3, "backward": both * 2 / 3}
    series = [times(name, ms) for name, ms in took.items()]
    early = 0.2 if issued is None else issued / both
    series += [times(name, ms * early, "host") for name, ms in took.items()]
    if changes.get("environment", environment()).device_kind == "cpu":
        series = [times(name, ms, "host") for name, ms in took.items()]
    return planted(
        "flash",
        case,
        changes,
        known={"ceilings": (matrix_ceiling(dtype, 700e12 if dtype == "bfloat16" else 50e12),)},
        series=tuple(series),
        quantities=tuple(quantities),
    )


def race_record(
    took: Mapping[str, float],
    shape: str = "1x16x16384x64",
    *,
    in_a_row: Mapping[str, float] | None = None,
    out: Mapping[str, str] | None = None,
    **changes: Any,
) -> Record:
    """A race with these times in ms; `out` gives the reason why a candidate did not run."""
    study = find_study("flash")
    racers = (*took, *(out or {}))
    (case,) = study.cases(study.flags(part=("race",), race=(shape,), racers=racers))
    series = [
        *(
            times("step", ms, variant=name, seed=index)
            for index, (name, ms) in enumerate(took.items())
        ),
        *(times("wall", ms, "host", variant=name) for name, ms in (in_a_row or {}).items()),
    ]
    return planted(
        "flash",
        case,
        changes,
        known={"attachments": {"excluded": dict(out or {})}},
        series=tuple(series),
    )
