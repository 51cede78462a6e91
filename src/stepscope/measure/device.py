"""One device behind one small interface, so that every instrument works on CPU and GPU alike."""

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
"""About the highest clock of a GPU of these years; a slower one is kept busy for longer."""
_COMMON_POOL = (0, 0)
"""Of the allocator: what a graph was captured in is a pool of its own."""


class Timestamp:
    """A moment: on the host's clock and, where the device has a queue, in that queue."""

    __slots__ = ("event", "host_s")

    def __init__(self, host_s: float, event: Any = None) -> None:
        self.host_s = host_s
        self.event = event


class Device(ABC):
    """What the instruments need of a device."""

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
        """Time between two marks in the device's queue; None where there is no queue."""

    @abstractmethod
    def lacks(self) -> dict[str, str]:
        """Number formats that this device cannot compute in, each with the reason."""

    @abstractmethod
    def reset_peak(self) -> None: ...

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Most memory held since `reset_peak`; None where the system does not tell."""

    def held_bytes(self) -> int | None:
        """Memory in use now; None where the system does not count tensors."""
        return None

    def replayed_bytes(self) -> int:
        """Memory that captured graphs keep for their replays and that counts as held by nothing."""
        return 0

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was issued is done."""

    def reached(self, mark: Timestamp) -> bool:  # noqa: ARG002
        """Whether all before that mark is done; the host does not wait for it."""
        return True

    @abstractmethod
    def occupy(self, ms: float) -> None:
        """Keep the device busy for about that long, so that the host gets ahead of it."""

    def release(self) -> None:
        """Give back what a finished case left in caches."""
        gc.collect()

    def read(self) -> Reading:
        """Clocks, power and throttling now."""
        return Reading(at_s=time.monotonic())

    @property
    def energy_missing(self) -> str:
        """Why there is no energy to read."""
        return "a CPU's counter is the system's alone, and of all that runs on it"

    def energy_j(self) -> float | None:
        """Joules taken so far, by the device's own counter; None where it has none."""
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
        units = {} if cpu_multiplies_bfloat16() else {
            "bfloat16-units": "this CPU has no bfloat16 instructions: products in it take many"
            " times as long as in float32"
        }  # fmt: skip
        return units | {
            "tf32": "TF32 exists on NVIDIA GPUs from Ampere on, not on a CPU; use float32",
            "graph": "CUDA graphs exist on NVIDIA GPUs, not on a CPU",
            "cublas": "cuBLAS multiplies on NVIDIA GPUs, not on a CPU",
            "kernels": "our kernels need an NVIDIA GPU; on a CPU the plain form runs",
        }

    def read(self) -> Reading:
        return Reading(at_s=time.monotonic(), waited_s=seconds_without_a_core())

    def synchronize(self) -> None:
        """Eager work on a CPU is done when the call returns."""

    def occupy(self, ms: float) -> None:
        """There is no queue that a host could fill."""

    def release(self) -> None:
        super().release()
        # Freed memory that the allocator keeps would hide the next case's growth.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

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
        if major >= 8:
            return {}
        capability = f"{self.name} has compute capability {major}.{minor}"
        return {
            "tf32": f"{capability}, TF32 needs 8.0; use float32",
            "bfloat16": f"{capability}, bfloat16 needs 8.0; use float16",
        }

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int | None:
        return int(torch.cuda.max_memory_allocated(self.torch_device))

    def held_bytes(self) -> int | None:
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

    @property
    def energy_missing(self) -> str:
        return f"the driver gives no energy counter of {self.name}"

    def energy_j(self) -> float | None:
        return self.telemetry.energy_j()


def pick_device(choice: str = "auto") -> Device:
    """The device of that name: `auto` takes the GPU where there is one."""
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    if choice == "cpu":
        return CpuDevice()
    if choice == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                "device 'cuda' is not here: torch sees no NVIDIA GPU",
                "use --device cpu, or see `stepscope doctor`",
            )
        return CudaDevice(int(os.environ.get("LOCAL_RANK", "0")))
    raise UsageError(f"device {choice!r} does not exist", "one of: auto, cpu, cuda")


def cpu_multiplies_bfloat16() -> bool:
    """Where the system does not tell what its processor has, it is taken to."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    held = {
        word
        for line in told.splitlines()
        if line.partition(":")[0].strip() in ("flags", "Features")
        for word in line.partition(":")[2].split()
    }
    return not held or bool(held & {"avx512_bf16", "amx_bf16", "bf16"})


def cpu_name() -> str:
    """The processor's model name as the system gives it."""
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
