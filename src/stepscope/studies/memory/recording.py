"""Measures one case: peaks of the plain step, then an account of every storage."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.records.memory import INPUTS, SavedTensor
from stepscope.records.schema import Quantity, Series
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.plans import prediction_for
from stepscope.studies.profile.tracing import TRACES
from stepscope.studies.step_peaks import plain_steps
from stepscope.studies.workload import TrainingStep, Workload

if TYPE_CHECKING:
    from stepscope.measure.allocator import CudaAllocator
    from stepscope.measure.device import Device
    from stepscope.measure.ledger import StorageLedger


def measure_memory(config: dict[str, Any], bench: Bench) -> Measurement:
    from stepscope.measure.allocator import CudaAllocator

    workload = msgspec.convert(config, Workload)
    if workload.graph:
        raise CaseSkipped("a graph is replayed without its operators: there is nothing to watch")
    device = bench.device
    allocator = CudaAllocator(device.torch_device) if device.kind == "cuda" else None
    found: dict[str, int] = {}
    if allocator is not None:
        # What cases before this one left of cuBLAS's work space is not this one's.
        allocator.library_bytes()
        device.release()
        found["context_bytes"] = _context_and_libraries(workload, device, allocator)
    device.reset_peak()
    step = TrainingStep(workload, device)
    took, peaks = plain_steps(step, device, allocator, config["steps"], bench)
    resident = device.peak_bytes() if allocator is None else None
    if resident is not None:
        found["resident_bytes"] = resident
    if allocator is not None:
        found["reserved_bytes"] = allocator.reserved()
        found["driver_bytes"] = allocator.driver_used()
    bench.progress(0, 1, "ledger")
    start = time.perf_counter()
    ledger = _account(step, device, allocator)
    recorded = (time.perf_counter() - start) * 1e3
    peaks = peaks or {peak.phase: peak.allocated for peak in ledger.peaks}
    found |= {f"peak.{phase}": size for phase, size in peaks.items()}
    found["peak_bytes"] = max(peaks.values())
    told = prediction_for(workload, device.kind)
    if told is not None:
        found |= {f"predicted.{moment.phase}": moment.allocated for moment in told.phases}
        found["predicted_bytes"] = told.peak.allocated
    size, operator, code = ledger.largest
    found["largest_bytes"] = size
    notes = {
        "ledger": msgspec.json.encode(ledger.peaks).decode(),
        "saved": msgspec.json.encode(_of_one_block(ledger.saved)).decode(),
        "largest": f"{operator} at {code}",
        "course": msgspec.json.encode(ledger.course.points()).decode(),
    }
    series = [
        Series(name="step", unit="ms", values=tuple(took[1:]), warmup=(took[0],)),
        Series(name="recorded", unit="ms", values=(recorded,)),
    ]
    if config.get("snapshot", "yes") == "yes":
        noted, history = _snapshot(step, device, workload)
        notes |= noted
        series += [Series(name="history", unit="ms", values=history)] if history else []
    return Measurement(
        series=tuple(series),
        quantities=workload.quantities()
        | {name: Quantity(value=value, unit="B") for name, value in found.items()},
        notes=notes,
    )


def _context_and_libraries(workload: Workload, device: Device, allocator: CudaAllocator) -> int:
    """What the driver counts beside the allocator, after a small step of the same kind has loaded
    the libraries and kernels, and before the model exists."""
    small = msgspec.structs.replace(
        workload, size="tiny", table="2025", context=128, batch=1, overrides={}
    )
    first = TrainingStep(small, device)
    for phase in first.phases():
        phase.run()
    del first, phase
    device.synchronize()
    device.release()
    return allocator.driver_used() - allocator.reserved()


def _account(step: TrainingStep, device: Device, allocator: CudaAllocator | None) -> StorageLedger:
    from stepscope.measure.ledger import StorageLedger

    step.reset()
    device.synchronize()
    libraries = 0
    if allocator is not None:
        libraries = allocator.library_bytes()
        # Taken again before the account begins, so that it does not look like an operator's.
        for phase in step.phases():
            phase.run()
        step.reset()
        device.synchronize()
    ledger = StorageLedger(device.torch_device, allocator, libraries)
    with ledger.watching(step.model, step.optimizer):
        ledger.count((step.tokens, step.targets), INPUTS)
        for phase in step.phases():
            ledger.phase(phase.name, phase.run)
    step.reset()
    return ledger


def _of_one_block(saved: Sequence[SavedTensor]) -> list[SavedTensor]:
    """All blocks save the same: the first stands for them."""
    return [
        tensor
        for tensor in saved
        if not tensor.module.startswith("blocks.") or tensor.module.startswith("blocks.0.")
    ]


def _snapshot(
    step: TrainingStep, device: Device, workload: Workload
) -> tuple[dict[str, str], tuple[float, ...]]:
    """Steps under the allocator's own recorder, kept where traces are kept, and how long each one
    took: the recorder's cost."""
    folder = os.environ.get(TRACES)
    if device.kind != "cuda" or not folder:
        return {}, ()
    from stepscope.measure.allocator import recorded_history

    path = Path(folder) / f"{workload.key}.memory.pickle"
    took: list[float] = []
    try:
        with recorded_history(path) as history:
            for _ in range(_RECORDED_STEPS):
                step.reset()
                device.synchronize()
                start = time.perf_counter()
                for phase in step.phases():
                    phase.run()
                device.synchronize()
                took.append((time.perf_counter() - start) * 1e3)
    except Exception as error:
        # Without a snapshot the account stands all the same.
        return {"snapshot_missing": f"{type(error).__name__}: {error}".splitlines()[0]}, ()
    notes = {"snapshot": path.name}
    if history.overflowed:
        notes["snapshot_incomplete"] = "its buffer was full: earlier events were overwritten"
    return notes, tuple(took)


_RECORDED_STEPS = 3
