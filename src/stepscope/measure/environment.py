"""The environment of a measurement: device, software, and the state of the checkout."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import psutil
import torch

from stepscope.measure.device import CudaDevice, Device, cpu_name
from stepscope.records.schema import Environment
from stepscope.version import __version__

_TRITON_FROM = (7, 0)
"""Minimum compute capability for Triton."""


def describe(device: Device) -> Environment:
    commit, dirty = _checkout()
    gpu = device if isinstance(device, CudaDevice) else None
    return Environment(
        device_kind=device.kind,
        device_name=device.name,
        device_count=torch.cuda.device_count() if gpu else 1,
        device_memory_bytes=device.memory_bytes,
        cpu=cpu_name(),
        cpu_cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        host_memory_bytes=int(psutil.virtual_memory().total),
        threads=torch.get_num_threads(),
        platform=platform.platform(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        stepscope=__version__,
        driver=gpu.telemetry.driver() if gpu else None,
        cuda=torch.version.cuda if gpu else None,
        cudnn=str(torch.backends.cudnn.version()) if gpu else None,  # type: ignore[no-untyped-call]
        triton=_triton_version(),
        power_limit_w=gpu.telemetry.power_limit_w() if gpu else None,
        max_sm_clock_mhz=gpu.telemetry.max_sm_clock_mhz() if gpu else None,
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        commit=commit,
        dirty=dirty,
    )


def lacks(device: Device) -> dict[str, str]:
    """Features that cases may need and that this machine lacks, each with the fix."""
    missing = device.lacks()
    no_triton = _without_triton(device)
    if no_triton:
        missing["kernels"] = f"the kernels need Triton: {no_triton}"
    if not any(shutil.which(name) for name in ("g++", "clang++")):
        missing["compiler"] = "torch.compile needs a C++ compiler: install g++"
    elif no_triton:
        missing["compiler"] = f"torch.compile on a GPU needs Triton: {no_triton}"
    return missing


def _without_triton(device: Device) -> str:
    """Reason why this GPU cannot run Triton kernels; empty if it can, or if it is not a GPU."""
    if not isinstance(device, CudaDevice):
        return ""
    if _triton_version() is None:
        return "pip install triton"
    if device.capability < _TRITON_FROM:
        have, need = (".".join(map(str, version)) for version in (device.capability, _TRITON_FROM))
        return f"{device.name} has compute capability {have}, Triton needs at least {need}"
    return ""


def _triton_version() -> str | None:
    from importlib import metadata

    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def _checkout() -> tuple[str | None, bool | None]:
    """Commit and dirty flag of the checkout this package runs from.

    A copy without git history takes its commit from STEPSCOPE_COMMIT.
    """
    given = os.environ.get("STEPSCOPE_COMMIT")
    if given:
        return given.removesuffix("+dirty"), given.endswith("+dirty")
    package = Path(__file__).resolve().parents[1]

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *args],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    changes = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD"), None if changes is None else bool(changes)
