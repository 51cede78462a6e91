"""A bench on this machine's processor, for measuring in a test."""

from __future__ import annotations

from stepscope.measure.device import CpuDevice


class QuietBench:
    device = CpuDevice()

    def progress(self, done: int, total: int, what: str) -> None:
        """Ignore progress."""
