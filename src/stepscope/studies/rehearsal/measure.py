"""Record a step: the times of its phases and of each gradient. Imports torch lazily."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stepscope.analysis.rehearsal.recording import NOTE, ReadyTimes
from stepscope.records.schema import Clock, Series
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.rehearsal.cases import RecordingCase
from stepscope.training.factory import make_step
from stepscope.training.workload import Workload

if TYPE_CHECKING:
    from stepscope.measure.device import Device


def measure(case: RecordingCase, bench: Bench) -> Measurement:
    series, times = record_step(
        case,
        bench.device,
        case.steps,
        lambda done, total: bench.progress(done, total, "steps recorded"),
    )
    return Measurement(series=series, quantities=case.quantities(), attachments={NOTE: times})


def record_step(
    workload: Workload, device: Device, steps: int, progress: Callable[[int, int], None]
) -> tuple[tuple[Series, ...], tuple[ReadyTimes, ...]]:
    """Record the times of the phases and of each gradient."""
    from stepscope.measure.gradients import record_gradients

    if workload.graph or workload.fuses_loss:
        raise CaseSkipped("a simulation needs separate forward, loss and backward phases")
    step = make_step(workload, device)
    forward, loss, backward, optimizer = step.phases()

    def compute_loss() -> None:
        forward.run()
        loss.run()

    named = [(name, p) for name, p in step.model.named_parameters() if p.requires_grad]
    times = record_gradients(
        [parameter for _, parameter in named],
        compute_loss,
        backward.run,
        optimizer.run,
        device,
        steps=steps,
        before=step.reset,
        progress=progress,
    )
    missing = [name for (name, _), ready in zip(named, times.ready, strict=True) if not ready]
    if missing:
        raise CaseSkipped(f"the backward pass computes no gradient of {missing[0]}")
    ready_times = tuple(
        ReadyTimes(
            name=name,
            elements=parameter.numel(),
            element_bytes=parameter.element_size(),
            kind=f"{parameter.dtype} {parameter.device}",
            ready_ms=tuple(ready),
        )
        for (name, parameter), ready in zip(named, times.ready, strict=True)
    )
    clock: Clock = "device" if device.kind == "cuda" else "host"
    steps_ms = [sum(parts) for parts in zip(*times[:3], strict=True)]
    phases = {
        "step": steps_ms,
        "forward": times.forward,
        "backward": times.backward,
        "optimizer": times.optimizer,
    }
    series = tuple(
        Series(name=name, unit="ms", clock=clock, values=tuple(values))
        for name, values in phases.items()
    )
    return series, ready_times
