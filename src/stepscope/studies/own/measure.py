"""Measure one case: time it, count FLOPs and storages once, then trace it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.records.memory import INPUTS
from stepscope.records.schema import Quantity
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.own.cases import AS_IS, OwnCase
from stepscope.studies.own.step import own_step
from stepscope.training.peaks import account
from stepscope.training.timed import time_steps
from stepscope.training.traced import trace_step
from stepscope.training.user_step import UserStep

if TYPE_CHECKING:
    from stepscope.measure.ledger import StorageLedger

_MAX_SAVED = 200


def measure(case: OwnCase, bench: Bench) -> Measurement:
    device = bench.device
    step = own_step(case, device)
    # Count FLOPs while it is eager: operators of compiled code are not visible.
    counted = [
        msgspec.structs.replace(quantity, name="batch") if quantity.name == "samples" else quantity
        for quantity in step.quantities()
    ]
    step.compile()
    device.reset_peak()
    timing = time_steps(step, bench, case)
    peak = device.peak_bytes()
    attachments: dict[str, Any] = {}
    notes: dict[str, str] = {}
    bench.progress(0, 1, "memory")
    if case.compile == "no" and case.attention == AS_IS:
        ledger = _memory_ledger(step)
        largest = sorted(ledger.saved, key=lambda tensor: -tensor.bytes)[:_MAX_SAVED]
        attachments = {"ledger": ledger.peaks, "saved": largest}
        if device.kind == "cpu":
            peak = max(each.allocated for each in ledger.peaks)
    else:
        traced_part = "the model" if case.compile != "no" else "its fused attention"
        notes["memory_missing"] = (
            f"{traced_part} is compiled: tensors that it saves are not visible"
        )
    if peak is not None:
        counted.append(Quantity(name="peak_bytes", value=peak, unit="B"))
    bench.progress(0, 1, "trace")
    with step.named_parts():
        traced = trace_step(step, device, case.key, steps=case.traced)
    return Measurement(
        series=(*timing.series, traced.series),
        quantities=tuple(counted),
        readings=timing.readings,
        notes=notes | traced.notes,
        attachments=attachments | traced.attachments,
    )


def _memory_ledger(step: UserStep) -> StorageLedger:
    from stepscope.measure.allocator import CudaAllocator
    from stepscope.measure.ledger import StorageLedger

    torch_device = step.device.torch_device
    allocator = CudaAllocator(torch_device) if step.device.kind == "cuda" else None
    ledger = StorageLedger(torch_device, allocator)
    ledger.count(step.inputs, INPUTS)
    account(ledger, step)
    return ledger
