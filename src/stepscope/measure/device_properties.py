"""Hardware properties of a device (units, registers, caches, clocks) from the driver or the system.

Properties that are not reported are left out; nothing is looked up in a table.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from stepscope.measure.device import CudaDevice, Device

# CUdevice_attribute of the CUDA driver API, with the unit and the factor of its value.
_ATTRIBUTES: dict[str, tuple[int, str, float]] = {
    "sms": (16, "1", 1),
    "lanes_per_warp": (10, "1", 1),
    "threads_per_sm": (39, "1", 1),
    "blocks_per_sm": (106, "1", 1),
    "threads_per_block": (1, "1", 1),
    "registers_per_sm": (82, "1", 1),
    "shared_bytes_per_sm": (81, "B", 1),
    "shared_bytes_per_block": (97, "B", 1),
    "l2_bytes": (38, "B", 1),
    "bus_bits": (37, "bit", 1),
    "clock_hz": (13, "Hz", 1e3),
    "memory_clock_hz": (36, "Hz", 1e3),
}
# The widest vector registers by the flags of /proc/cpuinfo, widest first.
_VECTORS = (("avx512f", 512), ("avx2", 256), ("avx", 256), ("asimd", 128), ("sse2", 128))
_MATRIX_FLAGS = ("amx_tile", "avx512_bf16", "avx_vnni", "sme", "sve", "i8mm", "bf16")

Properties = dict[str, tuple[float, str]]
"""Values with their units."""
Ask = Callable[[int], int | None]
"""Function that queries a driver attribute by its number."""


def device_properties(device: Device) -> tuple[Properties, dict[str, str]]:
    """Return the properties with a unit, and the properties in words."""
    if isinstance(device, CudaDevice):
        major, minor = device.capability
        words = {"name": device.name, "compute capability": f"{major}.{minor}"}
        properties = cuda_properties(_driver(device.torch_device.index or 0))
        properties["memory_bytes"] = (float(device.memory_bytes), "B")
        watts = device.telemetry.power_limit_w()
        if watts is not None:
            properties["power_limit_w"] = (watts, "W")
        return properties, words
    properties, words = cpu_properties(Path("/"))
    properties["cores"] = (float(_cores()), "1")
    properties["memory_bytes"] = (float(device.memory_bytes), "B")
    return properties, {"name": device.name} | words


def cuda_properties(ask: Ask) -> Properties:
    properties: Properties = {}
    for name, (attribute, unit, factor) in _ATTRIBUTES.items():
        answer = ask(attribute)
        if answer:
            properties[name] = (answer * factor, unit)
    if "threads_per_sm" in properties and "lanes_per_warp" in properties:
        warps = properties["threads_per_sm"][0] / properties["lanes_per_warp"][0]
        properties["warps_per_sm"] = (warps, "1")
    if "memory_clock_hz" in properties and "bus_bits" in properties:
        # Two transfers per clock (DDR), as in all GPU memories.
        rate = 2 * properties["memory_clock_hz"][0] * properties["bus_bits"][0] / 8
        properties["memory_rate"] = (rate, "B/s")
    return properties


def _driver(ordinal: int) -> Ask:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return lambda _: None
    device = ctypes.c_int()
    if library.cuInit(0) or library.cuDeviceGet(ctypes.byref(device), ordinal):
        return lambda _: None
    handle = device.value

    def ask(attribute: int) -> int | None:
        answer = ctypes.c_int()
        failed = library.cuDeviceGetAttribute(ctypes.byref(answer), attribute, handle)
        return None if failed else answer.value

    return ask


def cpu_properties(root: Path) -> tuple[Properties, dict[str, str]]:
    """Read the properties from the system files below `root`; empty without them (not Linux)."""
    properties: Properties = {}
    cpu = root / "sys/devices/system/cpu/cpu0"
    for index in sorted(cpu.glob("cache/index*")):
        level, kind = _text(index / "level"), _text(index / "type")
        size, line = _size(_text(index / "size")), _text(index / "coherency_line_size")
        if kind in ("Data", "Unified") and size is not None:
            properties[f"l{level}_bytes"] = (size, "B")
        if kind in ("Data", "Unified") and line.isdigit():
            properties["line_bytes"] = (float(line), "B")
    kilohertz = _text(cpu / "cpufreq/cpuinfo_max_freq")
    listed = _cpuinfo(root)
    megahertz = listed.get("cpu MHz", "")
    if kilohertz.isdigit():
        properties["clock_hz"] = (float(kilohertz) * 1e3, "Hz")
    elif megahertz.replace(".", "", 1).isdigit():
        properties["clock_hz"] = (float(megahertz) * 1e6, "Hz")
    flags = (listed.get("flags") or listed.get("Features") or "").split()
    bits = next((width for flag, width in _VECTORS if flag in flags), None)
    if bits is not None:
        properties["vector_bits"] = (float(bits), "bit")
    matrix = [flag for flag in _MATRIX_FLAGS if flag in flags]
    return properties, {
        "matrix instructions": ", ".join(matrix) or "none reported"
    } if flags else {}


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _size(text: str) -> float | None:
    """Convert `32K`, `32768K` or `1M` to bytes."""
    factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 0)
    return float(text[:-1]) * factor if factor and text[:-1].isdigit() else None


def _cpuinfo(root: Path) -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo."""
    first = _text(root / "proc/cpuinfo").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
