"""The energy of the timed steps, where the device has a counter."""

from __future__ import annotations

from stepscope.measure.device import Device

ENERGY_MOVES_S = 0.1
"""How seldom a driver moves its counter at most."""
_WITHIN_S = 1.0
"""Steps that take less together have no energy: one move of the counter would be a tenth of it."""


class StepEnergy:
    """`begin` ahead of the first timed step, `end` after the last."""

    def __init__(self, notes: dict[str, str]) -> None:
        self.joules: float | None = None
        """Of a timed step."""
        self._begun: float | None = None
        self._notes = notes

    def begin(self, device: Device) -> None:
        self._begun = device.energy_j()

    def drop(self) -> None:
        if self._begun is not None:
            self._begun = None
            self._notes["no_energy"] = "a step raised among the timed ones, and the counter ran on"

    def end(self, device: Device, took_s: float, steps: int) -> None:
        begun, now = self._begun, device.energy_j()
        if begun is None or now is None:
            self._notes.setdefault("no_energy", device.energy_missing)
        elif took_s < _WITHIN_S:
            self._notes["no_energy"] = (
                f"the timed steps take {took_s:.2g} s, and the counter needs {_WITHIN_S:g} s"
                " (give a larger --timed)"
            )
        else:
            self.joules = (now - begun) / steps
