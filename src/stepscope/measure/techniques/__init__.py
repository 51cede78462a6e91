"""Six performance techniques, each as a slow and a fast variant of the same work.

The two variants compute the same result and differ in exactly one property, so that their times
show the cost of that property. On a GPU they are Triton kernels, on a CPU calls of torch.
"""

from __future__ import annotations

from stepscope.measure.device import Device
from stepscope.measure.techniques.pair import Pair


def make_pair(technique: str, device: Device, elements: int, rows: int) -> Pair:
    """Create a technique's pair on arrays of `elements` numbers and matrices of `rows` × `rows`."""
    if device.kind == "cuda":
        from stepscope.measure.techniques import on_gpu

        return on_gpu.PAIRS[technique](device.torch_device, elements, rows)
    from stepscope.measure.techniques import on_cpu

    return on_cpu.PAIRS[technique](elements, rows)
