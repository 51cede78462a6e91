"""Explain why a training step ran out of memory, and find the smallest change that fits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.analysis.predict.fit import changes_that_fit
from stepscope.analysis.predict.step import overrun, predict
from stepscope.records.memory import PostMortem, Remedy
from stepscope.training.plans import can_be_predicted, plan_of
from stepscope.training.workload import Workload

if TYPE_CHECKING:
    from stepscope.analysis.predict.plan import StepPlan
    from stepscope.measure.device import Device
    from stepscope.training.case import Bench

NOTE = "post_mortem"
_REMEDIES = 3
_CHANGEABLE = ("batch", "dtype", "attention", "optimizer", "checkpoint")
_UNITS = {"B": 1, "BYTES": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = r"([0-9.]+) (bytes|B|KiB|MiB|GiB)"


class Refusal(NamedTuple):
    """Numbers in an allocator's out-of-memory message, in bytes; 0 for a missing number."""

    asked: int
    held: int
    allowed: int


def read_refusal(message: str) -> Refusal:
    def size(pattern: str) -> int:
        match = re.search(pattern, message, re.IGNORECASE)
        return int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0

    return Refusal(
        asked=size(rf"tried to allocate {_SIZE}"),
        held=size(rf"of the allocated memory {_SIZE}"),
        allowed=size(rf"{_SIZE} allowed"),
    )


def step_post_mortem(
    case: Workload | Mapping[str, Any], bench: Bench, message: str
) -> dict[str, Any]:
    """The attachment of a case, or of its config, that ran out of memory."""
    workload = case if isinstance(case, Workload) else msgspec.convert(case, Workload)
    if not can_be_predicted(workload, bench.device.kind):
        return {}
    refusal = read_refusal(message)
    limit = _usable_bytes(bench.device)
    post_mortem = examined(
        workload, bench.device.kind, min(limit, refusal.allowed or limit), refusal
    )
    return {NOTE: post_mortem}


def examined(workload: Workload, device_kind: str, limit: int, refusal: Refusal) -> PostMortem:
    """The post-mortem of a workload. Pure: it also serves records from before such attachments."""
    plan = plan_of(workload, device_kind)
    peak = predict(plan).peak
    moment = overrun(plan, limit) or peak
    return PostMortem(
        limit=limit,
        asked=refusal.asked,
        held=refusal.held,
        phase=moment.phase,
        lines=dict(sorted(moment.lines.items(), key=lambda item: -item[1])),
        needed=peak.allocated,
        remedies=tuple(
            Remedy(words=change.words, peak=change.peak, changes=_differences(plan, change.plan))
            for change in changes_that_fit(plan, limit, most=_REMEDIES)
        ),
    )


def _differences(before: StepPlan, after: StepPlan) -> dict[str, str | int]:
    return {
        name: getattr(after, name)
        for name in _CHANGEABLE
        if getattr(after, name) != getattr(before, name)
    }


def _usable_bytes(device: Device) -> int:
    """Bytes that the allocator can use: without context, libraries and other processes."""
    if device.kind != "cuda":
        return device.memory_bytes
    from stepscope.measure.allocator import CudaAllocator

    allocator = CudaAllocator(device.torch_device)
    return device.memory_bytes - (allocator.driver_used() - allocator.reserved())
