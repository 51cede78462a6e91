"""Energy of the timed steps, if the device has an energy counter."""

from __future__ import annotations

from stepscope.measure.device import Device

ENERGY_MOVES_S = 0.1
"""Longest interval between updates of a driver's energy counter."""
_WITHIN_S = 1.0
"""Shortest total time for which energy is reported: one update of the counter is a tenth of it."""


class StepEnergy:
    """Call `begin` before the first timed step and `end` after the last."""

    def __init__(self, notes: dict[str, str]) -> None:
        self.joules: float | None = None
        """Energy per timed step."""
        self._start_j: float | None = None
        self._notes = notes

    def begin(self, device: Device) -> None:
        self._start_j = device.energy_j()

    def drop(self) -> None:
        if self._start_j is not None:
            self._start_j = None
            self._notes["no_energy"] = (
                "a timed step raised an exception, and the counter includes it"
            )

    def end(self, device: Device, took_s: float, steps: int) -> None:
        start, now = self._start_j, device.energy_j()
        if start is None or now is None:
            self._notes.setdefault("no_energy", device.energy_missing)
        elif took_s < _WITHIN_S:
            self._notes["no_energy"] = (
                f"the timed steps take {took_s:.2g} s, and the counter needs {_WITHIN_S:g} s"
                " (give a larger --steps)"
            )
        else:
            self.joules = (now - start) / steps
