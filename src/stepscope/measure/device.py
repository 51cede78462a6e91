"""A small device interface, so that every instrument works on both CPU and GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from stepscope.errors import UsageError
from stepscope.measure.scheduling import seconds_without_a_core
from stepscope.measure.telemetry import Telemetry
from stepscope.records.schema import Reading

_CYCLES_PER_MS = 2_000_000
"""About the highest clock of current GPUs; a slower GPU stays busy for longer."""
_COMMON_POOL = (0, 0)
"""Pool id of ordinary allocations; each captured CUDA graph has a private pool."""
_TUNED = 9
"""Major compute capability that the tiles of attention are tuned for."""
_FP8_FROM = (8, 9)


class Timestamp:
    """A point in time: on the CPU clock and, if the device has a queue, in that queue."""

    __slots__ = ("event", "host_s")

    def __init__(self, host_s: float, event: Any = None) -> None:
        self.host_s = host_s
        self.event = event


class Device(ABC):
    """The device operations that the instruments use."""

    kind: str
    torch_device: torch.device

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def memory_bytes(self) -> int: ...

    @abstractmethod
    def mark(self) -> Timestamp: ...

    @abstractmethod
    def device_ms(self, start: Timestamp, end: Timestamp) -> float | None:
        """Time between two marks in the device's queue; None if there is no queue."""

    @abstractmethod
    def lacks(self) -> dict[str, str]:
        """Unsupported dtypes and features of this device, each with the reason."""

    @abstractmethod
    def reset_peak(self) -> None: ...

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Peak memory since `reset_peak`; None if the system does not report it."""

    def allocated_bytes(self) -> int | None:
        """Memory in use now; None if the system does not count tensors."""
        return None

    def replayed_bytes(self) -> int:
        """Memory in the private pools of captured graphs that no live tensor accounts for."""
        return 0

    def peak_with_graphs(self) -> int | None:
        """Peak memory since `reset_peak`, with what replays of captured graphs use: they allocate
        nothing, so that the allocator's peak does not include it."""
        peak = self.peak_bytes()
        return None if peak is None else peak + self.replayed_bytes()

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all issued work is done."""

    def reached(self, mark: Timestamp) -> bool:  # noqa: ARG002
        """Return True if all work before that mark is done, without waiting."""
        return True

    @abstractmethod
    def occupy(self, ms: float) -> None:
        """Keep the device busy for about `ms` milliseconds, so that the CPU gets ahead of it."""

    def release(self) -> None:
        """Free the cached memory that a finished case left behind."""
        gc.collect()

    def read(self) -> Reading:
        """Current clocks, power and throttling."""
        return Reading(at_s=time.monotonic())

    def utilization(self) -> float | None:
        """Share of the last second or so in which the device worked, for any process; None if it is
        not reported."""
        return None

    @property
    def energy_missing(self) -> str:
        """The reason why there is no energy counter to read."""
        return "a CPU's energy counter needs system privileges and includes all processes"

    def energy_j(self) -> float | None:
        """Joules consumed so far, by the device's own counter; None if it has no counter."""
        return None


class CpuDevice(Device):
    kind = "cpu"
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self._baseline = 0

    @property
    def name(self) -> str:
        return cpu_name()

    @property
    def memory_bytes(self) -> int:
        import psutil

        return int(psutil.virtual_memory().total)

    def mark(self) -> Timestamp:
        return Timestamp(time.perf_counter())

    def device_ms(self, start: Timestamp, end: Timestamp) -> float | None:  # noqa: ARG002
        return None

    def lacks(self) -> dict[str, str]:
        units = (
            {}
            if cpu_multiplies_bfloat16()
            else {
                "bfloat16-units": "this CPU has no bfloat16 instructions: matmuls in bfloat16 take"
                " many times as long as in float32"
            }
        )
        return units | {
            "tf32": "TF32 exists on NVIDIA GPUs from Ampere on, not on a CPU; use float32",
            "fp8": "FP8 matmuls exist on NVIDIA GPUs from Ada on, not on a CPU; `stepscope run fp8`"
            " emulates their rounding",
            "graph": "CUDA graphs exist on NVIDIA GPUs, not on a CPU",
            "cublas": "cuBLAS runs on NVIDIA GPUs, not on a CPU",
            "kernels": "the Triton kernels need an NVIDIA GPU; a CPU runs the PyTorch version",
        }

    def read(self) -> Reading:
        return Reading(at_s=time.monotonic(), waited_s=seconds_without_a_core())

    def synchronize(self) -> None:
        """Eager work on a CPU is done when the call returns."""

    def occupy(self, ms: float) -> None:
        """Do nothing: there is no queue that the CPU could fill."""

    def release(self) -> None:
        super().release()
        # Freed memory in the allocator's cache would hide the growth of the next case.
        trim_heap()

    def reset_peak(self) -> None:
        import psutil

        # Writing 5 resets the kernel's high-water mark of this process's resident memory.
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._baseline = int(psutil.Process().memory_info().rss)
        except OSError:
            self._baseline = 0

    def peak_bytes(self) -> int | None:
        if not self._baseline:
            return None
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return max(0, int(line.split()[1]) * 1024 - self._baseline)
        return None


class CudaDevice(Device):
    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(index)
        self._properties = torch.cuda.get_device_properties(index)
        self.telemetry = Telemetry(str(getattr(self._properties, "uuid", "")))

    @property
    def name(self) -> str:
        return str(self._properties.name)

    @property
    def memory_bytes(self) -> int:
        return int(self._properties.total_memory)

    @property
    def capability(self) -> tuple[int, int]:
        return int(self._properties.major), int(self._properties.minor)

    def mark(self) -> Timestamp:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return Timestamp(time.perf_counter(), event)

    def device_ms(self, start: Timestamp, end: Timestamp) -> float | None:
        return float(start.event.elapsed_time(end.event))

    def lacks(self) -> dict[str, str]:
        major, minor = self.capability
        capability = f"{self.name} has compute capability {major}.{minor}"
        missing = {}
        if torch.version.hip is not None:
            missing["fp8"] = "FP8 matmuls are implemented for NVIDIA GPUs; use bfloat16"
        elif (major, minor) < _FP8_FROM:
            missing["fp8"] = f"{capability}, FP8 matmuls need 8.9; use bfloat16"
        if torch.version.hip is not None or major != _TUNED:
            missing["tuned-attention"] = (
                f"Stepscope's attention kernels are tuned for compute capability {_TUNED}, not for"
                f" {self.name}: impl='auto' uses torch's"
            )
        if major < 8:
            missing |= {
                "tf32": f"{capability}, TF32 needs 8.0; use float32",
                "bfloat16": f"{capability}, bfloat16 needs 8.0; use float16",
            }
        return missing

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int | None:
        return int(torch.cuda.max_memory_allocated(self.torch_device))

    def allocated_bytes(self) -> int | None:
        return int(torch.cuda.memory_allocated(self.torch_device))

    def replayed_bytes(self) -> int:
        return sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if segment["device"] == self.torch_device.index
            and segment.get("segment_pool_id", _COMMON_POOL) != _COMMON_POOL
        )

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def reached(self, mark: Timestamp) -> bool:
        return bool(mark.event.query())

    def occupy(self, ms: float) -> None:
        torch.cuda._sleep(int(ms * _CYCLES_PER_MS))  # type: ignore[no-untyped-call]

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def read(self) -> Reading:
        return self.telemetry.read()

    def utilization(self) -> float | None:
        return self.telemetry.utilization()

    @property
    def energy_missing(self) -> str:
        return f"the driver reports no energy counter for {self.name}"

    def energy_j(self) -> float | None:
        return self.telemetry.energy_j()


def pick_device(choice: str = "auto") -> Device:
    """Return the device of that name; `auto` picks the GPU if there is one."""
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    if choice == "cpu":
        return CpuDevice()
    if choice == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                "device 'cuda' is not available: torch sees no NVIDIA GPU",
                "use --device cpu, or see `stepscope doctor`",
            )
        return CudaDevice(int(os.environ.get("LOCAL_RANK", "0")))
    raise UsageError(f"device {choice!r} does not exist", "one of: auto, cpu, cuda")


def trim_heap() -> None:
    """Return freed memory in the C library's cache to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def cpu_multiplies_bfloat16() -> bool:
    """Return True if the CPU has bfloat16 instructions, or if the system does not report them."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    flags = {
        word
        for line in cpuinfo.splitlines()
        if line.partition(":")[0].strip() in ("flags", "Features")
        for word in line.partition(":")[2].split()
    }
    return not flags or bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def cpu_name() -> str:
    """The processor's model name as reported by the system."""
    import platform
    import subprocess

    try:
        listing = subprocess.run(["lscpu"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        listing = ""
    for line in listing.splitlines():
        if line.startswith("Model name:"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
