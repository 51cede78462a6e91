"""Steps under torch.profiler, kept as a trace that `stepscope trace` and Perfetto read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from stepscope.measure.device import Device

STEP_MARK = "ProfilerStep#"
_FIRST_STEPS = 1
"""Profiled but not marked as steps: the profiler itself starts up in them."""


class Tracer:
    """torch.profiler, started and stopped by hand. A process can hold only one at a time."""

    def __init__(self, kind: str) -> None:
        activities = [ProfilerActivity.CPU]
        if kind == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)

    def start(self) -> None:
        self._profiler.start()

    def stop(self) -> None:
        self._profiler.stop()

    def write(self, path: Path) -> None:
        """Compressed where the name ends in .gz."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(path))


def capture(
    step: Callable[[], object],
    device: Device,
    path: Path,
    *,
    steps: int = 3,
    before: Callable[[], None] | None = None,
) -> Path:
    """Run the step under the profiler and write its trace, compressed where the name ends in .gz.

    A marked step begins on an idle device and lasts until the device is idle again, as a sample of
    the timer does. `before` runs ahead of each step, outside of it. Warming up is the caller's.
    """
    tracer = Tracer(device.kind)
    tracer.start()
    try:
        for number in range(-_FIRST_STEPS, steps):
            if before:
                before()
            device.synchronize()
            if number < 0:
                step()
                device.synchronize()
                continue
            with record_function(f"{STEP_MARK}{number}"):
                step()
                device.synchronize()
    finally:
        tracer.stop()
    tracer.write(path)
    return path
