"""The kernels that a call runs on a GPU, with their times, from torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from stepscope.measure.device import Device

_MAX_NAME_LENGTH = 160
SEPARATOR = "; "


class KernelRun(NamedTuple):
    """One kernel execution on the device."""

    name: str
    ms: float


def profile_kernels(run: Callable[[], object], device: Device) -> tuple[KernelRun, ...] | None:
    """Kernels of a call in the order they ran, without copies and fills; None on a CPU."""
    if device.kind != "cuda":
        return None
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    device.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        device.synchronize()
    on_device = [
        event
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
    on_device.sort(key=lambda event: event.time_range.start)
    return tuple(KernelRun(event.name, event.time_range.elapsed_us() * 1e-3) for event in on_device)


def kernel_names(runs: Iterable[KernelRun]) -> str:
    """Join the distinct names in one line; long template names are cut to 160 characters."""
    return SEPARATOR.join(dict.fromkeys(run.name[:_MAX_NAME_LENGTH] for run in runs))
