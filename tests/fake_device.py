"""A device with a queue and a manually advanced clock: exact times for the timer."""

from __future__ import annotations

from typing import Any

import torch

from stepscope.measure.device import Device, Timestamp
from stepscope.measure.timer import Phase
from stepscope.records.schema import Reading


class FakeClock:
    """Replaces the `time` module; in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeDevice(Device):
    """Work is issued by the host and executed by the device in order.

    Without a queue it is a CPU: work is done when the call returns. `mark_cost` is the device time
    of every mark.
    """

    kind = "cuda"
    torch_device = torch.device("cpu")

    def __init__(self, clock: FakeClock, *, queue: bool = True, mark_cost: float = 0.0) -> None:
        self.clock = clock
        self.queue = queue
        self.mark_cost = mark_cost
        self.busy_until = clock.now
        self.log: list[str] = []

    def work(self, name: str, host: float, device: float = 0.0) -> Phase:
        """A phase that takes `host` seconds on the host and then `device` seconds on the device."""

        def run() -> None:
            self.log.append(name)
            self.clock.now += host
            self.busy_until = max(self.busy_until, self.clock.now) + device

        return Phase(name, run)

    @property
    def name(self) -> str:
        return "fake"

    @property
    def memory_bytes(self) -> int:
        return 1 << 30

    def mark(self) -> Timestamp:
        self.log.append("mark")
        if not self.queue:
            return Timestamp(self.clock.now)
        self.busy_until = max(self.busy_until, self.clock.now) + self.mark_cost
        return Timestamp(self.clock.now, self.busy_until)

    def device_ms(self, start: Timestamp, end: Timestamp) -> float | None:
        return (end.event - start.event) * 1e3 if self.queue else None

    def synchronize(self) -> None:
        self.log.append("wait")
        self.clock.now = max(self.clock.now, self.busy_until)

    def reached(self, mark: Timestamp) -> bool:
        return not self.queue or self.clock.now >= mark.event

    def occupy(self, ms: float) -> None:
        self.busy_until = max(self.busy_until, self.clock.now) + ms * 1e-3

    def lacks(self) -> dict[str, str]:
        return {}

    def reset_peak(self) -> None: ...

    def peak_bytes(self) -> int | None:
        return None

    def read(self) -> Reading:
        return Reading(at_s=self.clock.now)


def by_name(series: Any) -> dict[tuple[str, str], Any]:
    return {(each.name, each.clock): each for each in series}


def by_variant(series: Any) -> dict[tuple[str, str, str], Any]:
    return {(each.variant, each.name, each.clock): each for each in series}
