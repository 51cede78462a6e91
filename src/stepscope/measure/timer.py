"""The timer: takes the phases of a step as closures and returns raw samples.

A sample starts and ends on an idle device. Within it the CPU never waits, so events in the
device's queue give the device time, and the CPU clock gives two times: how long the CPU took to
issue the work, and the wall time until the device was done.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from stepscope.measure.device import Device, Timestamp
from stepscope.records.schema import Clock, Reading, Series

READING_EVERY_S = 0.25
MAX_SAMPLES = 200
ENOUGH_SAMPLES = 3


class Phase:
    """A named part of a step."""

    __slots__ = ("name", "run")

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        self.name = name
        self.run = run


class Timing(NamedTuple):
    series: tuple[Series, ...]
    readings: tuple[Reading, ...]


class Samples:
    """Collects values by name, variant and clock; warm-up samples are collected separately."""

    def __init__(self) -> None:
        self.collected: dict[tuple[str, str, Clock], tuple[list[float], list[float]]] = {}

    def add(self, name: str, clock: Clock, value: float, *, warm: bool, variant: str = "") -> None:
        values, warmup = self.collected.setdefault((name, variant, clock), ([], []))
        (values if warm else warmup).append(value)

    def series(self) -> tuple[Series, ...]:
        return tuple(
            Series(
                name=name,
                variant=variant,
                unit="ms",
                clock=clock,
                values=tuple(values),
                warmup=tuple(warmup),
            )
            for (name, variant, clock), (values, warmup) in self.collected.items()
        )


def time_step(
    phases: Sequence[Phase],
    device: Device,
    *,
    warmup: int = 5,
    steps: int = 10,
    min_seconds: float = 0.0,
    enough_seconds: float = math.inf,
    enough_samples: int = ENOUGH_SAMPLES,
    inner_marks: Literal["alternate", "always"] = "alternate",
    before: Callable[[], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Timing:
    """Time a step and its phases.

    `alternate` takes each sample twice, once without and once with marks between the phases, so
    that the series `step` has no marks and the phases can be compared with it. `always` marks every
    step, for studies of the first steps. `before` runs ahead of each sample, outside of it.
    Sampling ends after `steps` samples and `min_seconds`, or after `enough_samples` samples (and
    one step of warm-up) that took `enough_seconds`: long steps vary little.
    """
    samples = Samples()

    def take(*, warm: bool, inner: bool, outer: bool) -> None:
        if before:
            before()
        _sample(phases, device, samples, warm=warm, inner=inner, outer=outer)

    readings = [device.read()]
    alternate = inner_marks == "alternate"
    with no_collection():
        started = time.monotonic()
        for done in range(warmup):
            if done and time.monotonic() - started >= enough_seconds:
                break
            take(warm=False, inner=not alternate, outer=True)
            if progress:
                progress(done + 1, warmup + steps)
        started = time.monotonic()
        taken = 0
        while taken < steps or (
            time.monotonic() - started < min_seconds and taken < max(steps, MAX_SAMPLES)
        ):
            if alternate:
                take(warm=True, inner=False, outer=True)
            if not alternate or len(phases) > 1:
                take(warm=True, inner=True, outer=not alternate)
            taken += 1
            if progress:
                progress(warmup + min(taken, steps), warmup + steps)
            if time.monotonic() - readings[-1].at_s > READING_EVERY_S:
                readings.append(device.read())
            if taken >= enough_samples and time.monotonic() - started >= enough_seconds:
                break
    readings.append(device.read())
    return Timing(series=samples.series(), readings=tuple(readings))


def _sample(
    phases: Sequence[Phase],
    device: Device,
    samples: Samples,
    *,
    warm: bool,
    inner: bool,
    outer: bool,
) -> None:
    device.synchronize()
    marks: list[Timestamp] = [device.mark()]
    for phase in phases:
        phase.run()
        if inner:
            marks.append(device.mark())
    if not inner:
        marks.append(device.mark())
    device.synchronize()
    finished_s = time.perf_counter()

    def add(name: str, start: Timestamp, end: Timestamp, host_end_s: float) -> None:
        on_device = device.device_ms(start, end)
        if on_device is not None:
            samples.add(name, "device", on_device, warm=warm)
        samples.add(name, "host", (host_end_s - start.host_s) * 1e3, warm=warm)

    first, last = marks[0], marks[-1]
    if outer:
        add("step", first, last, finished_s)
        if last.event is not None:
            samples.add("issue", "host", (last.host_s - first.host_s) * 1e3, warm=warm)
    if inner:
        for phase, start, end in zip(phases, marks, marks[1:], strict=False):
            add(phase.name, start, end, end.host_s)


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable Python's garbage collector inside samples, as `timeit` does."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
