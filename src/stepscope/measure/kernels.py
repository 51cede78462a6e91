"""Which kernels a call really runs on a GPU, and how long each takes, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from stepscope.measure.device import Device

_LONGEST_NAME = 160
SEPARATOR = "; "


class KernelRun(NamedTuple):
    """One kernel on the device."""

    name: str
    ms: float


def profile_kernels(run: Callable[[], object], device: Device) -> tuple[KernelRun, ...] | None:
    """The kernels of a call in the order they ran; None on a device without kernels of its own.

    Copies and fills are no kernels and are left out.
    """
    if device.kind != "cuda":
        return None
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    device.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as held:
        run()
        device.synchronize()
    on_device = [
        event
        for event in held.events() or ()
        if event.device_type == DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
    on_device.sort(key=lambda event: event.time_range.start)
    return tuple(KernelRun(event.name, event.time_range.elapsed_us() * 1e-3) for event in on_device)


def kernel_names(runs: Iterable[KernelRun]) -> str:
    """Each name once, in one line; the tail of a template's name says nothing more."""
    return SEPARATOR.join(dict.fromkeys(run.name[:_LONGEST_NAME] for run in runs))
