"""A bench for measuring in a test, on this machine's processor unless a device is given."""

from __future__ import annotations

from stepscope.measure.device import CpuDevice, Device


class QuietBench:
    def __init__(self, device: Device | None = None) -> None:
        self.device = device or CpuDevice()

    def progress(self, done: int, total: int, what: str) -> None:
        """Ignore progress."""
