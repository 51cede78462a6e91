"""Measures one case: timed as it is, FLOPs and storages counted once, then traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.records.memory import INPUTS
from stepscope.records.schema import quantities
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.own import OwnCase
from stepscope.studies.own.changing import blocks_of
from stepscope.studies.traced import trace_step

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.measure.ledger import StorageLedger
    from stepscope.studies.own.step import OwnStep

_MOST_SAVED = 200


def measure_own(config: dict[str, Any], bench: Bench) -> Measurement:
    from stepscope.measure.energy import energy_quantities, measure_energy
    from stepscope.measure.modules import ModuleRanges
    from stepscope.measure.timer import time_step
    from stepscope.studies.own.step import OwnStep

    case = msgspec.convert(config, OwnCase)
    device = bench.device
    step = OwnStep(case, device)
    flops = _count_flops(step)
    step.compile()
    device.reset_peak()
    timing = time_step(
        step.phases(),
        device,
        warmup=config["warmup"],
        steps=config["steps"],
        before=step.reset,
        progress=lambda done, total: bench.progress(done, total, "steps"),
    )
    found: dict[str, tuple[float, str]] = {
        "parameters": (sum(p.numel() for p in step.model.parameters()), "parameters"),
        "batch": (case.batch, "samples"),
        "flops": (flops, "FLOP"),
        "blocks": (len(blocks_of(step.model)), "blocks"),
    }
    peak = device.peak_bytes()
    bench.progress(0, 1, "energy")
    attachments: dict[str, Any] = {}
    energy, notes = energy_quantities(
        measure_energy(lambda: _whole(step), device), step.tokens(), case.batch
    )
    bench.progress(0, 1, "memory")
    if case.compile == "no":
        ledger = _account(step, device)
        largest = sorted(ledger.saved, key=lambda tensor: -tensor.bytes)[:_MOST_SAVED]
        attachments = {"ledger": ledger.peaks, "saved": largest}
        if device.kind == "cpu":
            peak = max(each.allocated for each in ledger.peaks)
    else:
        notes["memory_missing"] = (
            "the model is compiled: what its kernels keep is not seen from outside"
        )
    if peak is not None:
        found["peak_bytes"] = (peak, "B")
    bench.progress(0, 1, "trace")
    with ModuleRanges([step.model]).entered():
        traced = trace_step(step.run, device, case.key, steps=config["traced"], before=step.reset)
    return Measurement(
        series=(*timing.series, traced.series),
        quantities=(*quantities(found), *energy),
        readings=timing.readings,
        notes=notes | traced.notes,
        attachments=attachments | traced.attachments,
    )


def _whole(step: OwnStep) -> None:
    step.reset()
    step.run()


def _count_flops(step: OwnStep) -> int:
    """Of one eager step, which also makes the optimizer's state."""
    from stepscope.measure.flops import CountingFlops

    counting = CountingFlops()
    with counting:
        step.run()
    step.reset()
    return counting.counted.total


def _account(step: OwnStep, device: Device) -> StorageLedger:
    """One step with every storage on its line."""
    import torch
    from torch.utils._pytree import tree_leaves

    from stepscope.measure.allocator import CudaAllocator
    from stepscope.measure.ledger import StorageLedger

    allocator = CudaAllocator(device.torch_device) if device.kind == "cuda" else None
    step.reset()
    ledger = StorageLedger(device.torch_device, allocator)
    with ledger.watching(step.model, step.optimizer):
        ledger.count((t for t in tree_leaves(step.batch) if isinstance(t, torch.Tensor)), INPUTS)
        for phase in step.phases():
            ledger.phase(phase.name, phase.run)
    step.reset()
    return ledger
