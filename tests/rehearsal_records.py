"""Recordings and checks with times chosen by a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rehearsal_check import STUDY as CHECK
from rehearsal_check.cases import Sampled, strategies

from sample_records import ceilings, record
from stepscope.analysis.rehearsal.recording import NOTE, Gradient, ReadyTimes, Recording
from stepscope.analysis.rehearsal.replay import Upkeep, name_of, replay
from stepscope.parallel.buckets import MEGABYTE, Item
from stepscope.records.schema import Ceiling, Quantity, Record, Series
from stepscope.studies.ddp.cases import ALONE
from stepscope.studies.registry import find_study

PHASES = {"step": 100.0, "forward": 30.0, "backward": 60.0, "optimizer": 10.0}


class Line:
    """A channel with a latency per message and a rate in bytes per ms, alone and in a queue."""

    def __init__(self, latency_ms: float, bytes_per_ms: float, gap_ms: float | None = None) -> None:
        self.latency, self.rate = latency_ms, bytes_per_ms
        self.gap = latency_ms if gap_ms is None else gap_ms

    def alone(self, size: float) -> float:
        return self.latency + size / self.rate

    def queued(self, size: float) -> float:
        return self.gap + size / self.rate


def recording(
    ready: Sequence[float], mebibytes: Sequence[float] | None = None, **phases: float
) -> Recording:
    """A recording with gradients in the model's order, 1 MiB each by default."""
    sizes = mebibytes or [1.0] * len(ready)
    return Recording(
        forward_ms=phases.get("forward", 30.0),
        backward_ms=phases.get("backward", 60.0),
        optimizer_ms=phases.get("optimizer", 10.0),
        gradients=tuple(
            Gradient(item=Item(f"p{index}", int(size * MEGABYTE) // 4, 4, "float32"), ready=at)
            for index, (at, size) in enumerate(zip(ready, sizes, strict=True))
        ),
    )


def ready_times(count: int = 6) -> tuple[ReadyTimes, ...]:
    """Gradients of 1 MiB at equal intervals, last parameter first."""
    backward = PHASES["backward"]
    return tuple(
        ReadyTimes(
            name=f"blocks.{index}.weight",
            elements=MEGABYTE // 4,
            element_bytes=4,
            kind="torch.float32 cpu",
            ready_ms=tuple(backward * (count - index) / count + step for step in (-0.1, 0.0, 0.1)),
        )
        for index in range(count)
    )


def recorded_record(*, context: int = 128, batch: int = 4, **changes: Any) -> Record:
    study = find_study("rehearsal")
    (case,) = study.cases(study.flags(context=(context,), batch=(batch,), dtype=("bfloat16",)))
    return _record("rehearsal", case.key, case.config, _phases(), changes)


def check_record(
    errors: Mapping[str, float] | None = None,
    *,
    ranks: int = 2,
    latency_ms: float = 1.0,
    **changes: Any,
) -> Record:
    """Real ranks on a link of 1 MiB per ms; `errors` by strategy, relative to the prediction."""
    flags = CHECK.flags(size=("tiny",), context=(32,), ranks=(ranks,), bucket_mb=(2.0,))
    (case,) = CHECK.cases(flags)
    channel, upkeep = Line(latency_ms, MEGABYTE), Upkeep(issue=0.05, agree=0.5)
    times = {
        Sampled("step", ALONE): PHASES["step"],
        Sampled("issue"): upkeep.issue,
        Sampled("agree"): upkeep.agree,
    }
    recorded = Recording.of_samples(_phases(), ready_times())
    for strategy, bucket_mb in strategies([2.0]):
        name = name_of(strategy, bucket_mb)
        predicted = replay(recorded, strategy, channel, bucket_mb, upkeep).step_ms
        times[Sampled("step", name)] = predicted * (1 + (errors or {}).get(name, 0.0))
    for size in (2**12, 2**20, 2**23):
        times[Sampled("alone", size=size)] = channel.alone(size)
        times[Sampled("burst", "8", size)] = 8 * channel.alone(size)
        # Negligible: packing is free in these records.
        times[Sampled("pack", size=size)] = 1e-9 * size
    series = tuple(
        Series(**what._asdict(), unit="ms", rank=rank, values=(ms,) * 5)
        for what, ms in times.items()
        for rank in range(ranks)
    )
    return _record(CHECK.name, case.key, case.config, (*_phases(), *series), changes)


def _phases() -> tuple[Series, ...]:
    return tuple(
        Series(name=name, unit="ms", values=(ms,) * 5, clock="device")
        for name, ms in PHASES.items()
    )


def _record(
    study: str,
    key: str,
    config: dict[str, Any],
    series: tuple[Series, ...],
    changes: dict[str, Any],
) -> Record:
    failed = changes.get("status", "ok") != "ok"
    copy = Ceiling(name="memory.copy", value=4e12, unit="B/s", source="measured")
    return record(
        study=study,
        case=key,
        config=config,
        **{
            "series": () if failed else series,
            "quantities": (Quantity(name="flops", value=9e12, unit="FLOP"),),
            "notes": {} if failed else {"compute": "waits", "backend": "gloo"},
            "attachments": {} if failed else {NOTE: msgspec.to_builtins(ready_times())},
            "ceilings": (*ceilings(), copy),
        }
        | changes,
    )
