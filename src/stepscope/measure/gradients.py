"""Time at which each gradient of a backward pass is ready, on the device's queue or the CPU's
clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from stepscope.measure.device import Device, Timestamp
from stepscope.measure.timer import no_collection


class GradientTimes(NamedTuple):
    """Samples in ms, one per recorded step."""

    forward: list[float]
    backward: list[float]
    optimizer: list[float]
    ready: list[list[float]]
    """By parameter: ms from the start of the backward pass; empty for a parameter without a
    gradient."""


def record_gradients(
    parameters: Sequence[Tensor],
    forward: Callable[[], object],
    backward: Callable[[], object],
    optimizer: Callable[[], object],
    device: Device,
    *,
    warmup: int = 2,
    steps: int = 5,
    before: Callable[[], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> GradientTimes:
    """Run full steps and mark each gradient from a post-accumulate-grad hook."""
    marks: dict[int, Timestamp] = {}

    def hook(index: int) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            marks[index] = device.mark()

        return ready

    handles = [
        parameter.register_post_accumulate_grad_hook(hook(index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
    ]
    times = GradientTimes([], [], [], [[] for _ in parameters])
    try:
        with no_collection():
            for taken in range(-warmup, steps):
                if before:
                    before()
                marks.clear()
                device.synchronize()
                bounds = [device.mark()]
                for phase in (forward, backward, optimizer):
                    phase()
                    bounds.append(device.mark())
                device.synchronize()
                if taken >= 0:
                    _add_sample(times, bounds, marks, device)
                if progress:
                    progress(taken + warmup + 1, warmup + steps)
    finally:
        for handle in handles:
            handle.remove()
    return times


def _add_sample(
    times: GradientTimes, bounds: list[Timestamp], marks: dict[int, Timestamp], device: Device
) -> None:
    start, forward, backward, optimizer = bounds
    times.forward.append(_between(device, start, forward))
    times.backward.append(_between(device, forward, backward))
    times.optimizer.append(_between(device, backward, optimizer))
    for index, mark in marks.items():
        times.ready[index].append(_between(device, forward, mark))


def _between(device: Device, start: Timestamp, end: Timestamp) -> float:
    on_device = device.device_ms(start, end)
    return (end.host_s - start.host_s) * 1e3 if on_device is None else on_device
