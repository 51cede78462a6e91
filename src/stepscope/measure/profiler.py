"""Record steps with torch.profiler into a trace that `stepscope trace` and Perfetto read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from stepscope.measure.device import Device
from stepscope.measure.packing import pack

STEP_MARK = "ProfilerStep#"
_LOG_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "6"


class Tracer:
    """torch.profiler, started and stopped explicitly. A process can run only one at a time."""

    def __init__(self, kind: str) -> None:
        activities = [ProfilerActivity.CPU]
        if kind == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self.prepared = False
        """True between `prepare` and `start`: initialized, but not tracing yet."""

    def prepare(self) -> None:
        """Initialize the profiler. Work before `start` is not in the trace."""
        with _quiet():
            self._profiler.prepare_trace()
        self.prepared = True

    def start(self) -> None:
        if self.prepared:
            self._profiler.start_trace()
            self.prepared = False
        else:
            with _quiet():
                self._profiler.start()

    def stop(self) -> None:
        if self.prepared:
            # A profiler that was only prepared cannot be stopped.
            self.start()
        self._profiler.stop()

    def write(self, path: Path) -> None:
        """Write the trace, compressed if the name ends in .gz."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".gz":
            self._profiler.export_chrome_trace(str(path))
            return
        plain = path.with_suffix("")
        try:
            self._profiler.export_chrome_trace(str(plain))
            pack(plain, path)
        finally:
            plain.unlink(missing_ok=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler from writing to standard error, which belongs to the program. Kineto, its
    library, reads the level when it is initialized, by the first profiler of a process; torch 2.11
    warns about later cycles in the first one."""
    given = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, _SILENT)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            yield
    finally:
        if not given:
            os.environ.pop(_LOG_LEVEL, None)


def profile_steps(
    step: Callable[[], object],
    device: Device,
    path: Path,
    *,
    steps: int = 3,
    before: Callable[[], None] | None = None,
) -> Path:
    """Run the step under the profiler and write its trace, compressed if the name ends in .gz.

    A marked step begins on an idle device and lasts until the device is idle again, like a sample
    of the timer. The profiler initializes during a step that is not in the trace. `before` runs
    ahead of each step, outside of it. The caller does the warm-up.
    """

    def run() -> None:
        step()
        device.synchronize()

    def settle() -> None:
        if before:
            before()
        device.synchronize()

    tracer = Tracer(device.kind)
    settle()
    tracer.prepare()
    try:
        run()
        settle()
        tracer.start()
        for index in range(steps):
            if index:
                settle()
            with record_function(f"{STEP_MARK}{index}"):
                run()
    finally:
        tracer.stop()
    tracer.write(path)
    return path
