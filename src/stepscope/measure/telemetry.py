"""Clocks, power and throttling of a GPU, read from the driver through NVML."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from stepscope.records.schema import Reading

_THROTTLE_BITS = {
    0x1: "idle",
    0x2: "application-clocks",
    0x4: "power-cap",
    0x8: "hardware-slowdown",
    0x10: "sync-boost",
    0x20: "thermal-software",
    0x40: "thermal-hardware",
    0x80: "power-brake",
    0x100: "display-clocks",
}


class Telemetry:
    """Readings of one GPU; a value is None if the driver does not report it."""

    def __init__(self, uuid: str) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            self._nvml = pynvml
        except Exception:
            # No driver library, no permission or a partitioned device: measure without telemetry.
            self._nvml = None

    def _query(self, query: Callable[[Any, Any], Any]) -> Any:
        if self._nvml is None:
            return None
        try:
            return query(self._nvml, self._handle)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def read(self) -> Reading:
        milliwatts = self._query(lambda n, h: n.nvmlDeviceGetPowerUsage(h))
        bits = self._query(lambda n, h: n.nvmlDeviceGetCurrentClocksEventReasons(h)) or 0
        return Reading(
            at_s=time.monotonic(),
            sm_clock_mhz=self._query(
                lambda n, h: float(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM))
            ),
            memory_clock_mhz=self._query(
                lambda n, h: float(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM))
            ),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            temperature_c=self._query(
                lambda n, h: float(n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU))
            ),
            throttle=tuple(name for bit, name in _THROTTLE_BITS.items() if bits & bit),
        )

    def utilization(self) -> float | None:
        """Share of the last sampling period in which a kernel of any process ran."""
        percent = self._query(lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu)
        return None if percent is None else float(percent) / 100

    def energy_j(self) -> float | None:
        """Energy consumed since the driver was loaded, in joules."""
        millijoules = self._query(lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h))
        return None if millijoules is None else float(millijoules) / 1e3

    def driver(self) -> str | None:
        version = self._query(lambda n, _: n.nvmlSystemGetDriverVersion())
        return None if version is None else str(version)

    def power_limit_w(self) -> float | None:
        milliwatts = self._query(lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h))
        return None if milliwatts is None else float(milliwatts) / 1e3

    def max_sm_clock_mhz(self) -> float | None:
        return self._query(lambda n, h: float(n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM)))  # type: ignore[no-any-return]
