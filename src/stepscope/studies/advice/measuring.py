"""One trial: both steps in turns, then both over the same data for their losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.records.schema import Quantity, Series
from stepscope.studies.advice import Trial
from stepscope.studies.base import Bench, Measurement

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.studies.own import OwnCase
    from stepscope.studies.own.step import OwnStep

BASE, CHANGED = "base", "changed"


def measure_trial(config: dict[str, Any], bench: Bench) -> Measurement:
    from stepscope.measure.turns import time_in_turns
    from stepscope.studies.own.step import OwnStep

    trial = msgspec.convert(config, Trial)
    device = bench.device
    losses, peaks = {}, {}
    for name, case in ((BASE, trial.base), (CHANGED, trial.changed)):
        bench.progress(0, 1, f"losses, {name}")
        # Alone, so that its peak is its own.
        losses[name], peaks[name] = _losses(case, device, trial.loss_steps)
        device.release()
    steps = {
        name: OwnStep(case, device) for name, case in ((BASE, trial.base), (CHANGED, trial.changed))
    }
    for step in steps.values():
        step.compile()
    timing = time_in_turns(
        {name: _in_its_format(step) for name, step in steps.items()},
        device,
        warmup=3,
        rounds=trial.rounds,
        progress=lambda done, total: bench.progress(done, total, "rounds"),
    )
    found = {
        f"peak.{name}": Quantity(value=peak, unit="B")
        for name, peak in peaks.items()
        if peak is not None
    }
    return Measurement(
        series=(
            *timing.series,
            *(Series(name=f"loss.{n}", unit="nats", values=v) for n, v in losses.items()),
        ),
        quantities=found,
        readings=timing.readings,
    )


def _in_its_format(step: OwnStep) -> Callable[[], None]:
    """The format of float32 products is a setting of the whole process."""

    def run() -> None:
        step.use_format()
        step.reset()
        step.run()

    return run


def _losses(
    case: OwnCase, device: Device, steps: int
) -> tuple[tuple[float, ...], int | None]:  # fmt: skip
    import torch

    from stepscope.studies.own.step import OwnStep

    step = OwnStep(case, device)
    step.compile()
    device.reset_peak()
    found = []
    for number in range(steps):
        torch.manual_seed(1000 + number)
        step.next_batch()
        step.run()
        assert step.loss is not None
        found.append(float(step.loss.detach()))
        step.reset()
    return tuple(found), device.peak_bytes() if device.kind == "cuda" else None
