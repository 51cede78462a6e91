"""Measure one case: peaks of the plain step, then a ledger of every storage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.errors import one_line
from stepscope.kernels.activation_policy import ALL
from stepscope.model.checkpointing import NONE
from stepscope.records.memory import (
    INPUTS,
    MODEL_BUILT,
    STEP_END,
    GradientMoment,
    SavedTensor,
)
from stepscope.records.schema import quantities
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.memory.cases import MemoryCase
from stepscope.training.factory import make_step
from stepscope.training.peaks import (
    account,
    peak_quantities,
    plain_steps,
)
from stepscope.training.traced import TRACES
from stepscope.training.workload import Workload

if TYPE_CHECKING:
    from stepscope.measure.allocator import CudaAllocator
    from stepscope.measure.device import Device
    from stepscope.training.subject import TrainingStep


def measure(case: MemoryCase, bench: Bench) -> Measurement:
    from stepscope.measure.allocator import CudaAllocator
    from stepscope.measure.ledger import StorageLedger

    if case.graph:
        raise CaseSkipped(
            "a graph is replayed without its operators, so there is nothing to record"
        )
    device = bench.device
    allocator = CudaAllocator(device.torch_device) if device.kind == "cuda" else None
    sizes: dict[str, int] = {}
    if allocator is not None:
        bench.progress(0, 1, "context and libraries")
        sizes["context_bytes"] = _context_and_libraries(case, device, allocator)
    device.reset_peak()
    step = make_step(case, device)
    ledger = StorageLedger(device.torch_device, allocator)
    ledger.count_existing((step.model,), ())
    ledger.count(step.inputs, INPUTS)
    ledger.moment(MODEL_BUILT)
    standing = {} if allocator is None else {MODEL_BUILT: allocator.standing()}
    plain = plain_steps(step, device, allocator, case.steps, bench)
    if allocator is None:
        resident = device.peak_bytes()
        sizes |= {} if resident is None else {"resident_bytes": resident}
    else:
        step.reset()
        standing |= plain.ends | {STEP_END: allocator.standing()}
        sizes["reserved_bytes"] = standing[STEP_END].reserved
        sizes["driver_bytes"] = standing[STEP_END].driver
    bench.progress(0, 1, "ledger")
    account(ledger, step)
    if allocator is not None:
        ledger.library_bytes = sizes["library_bytes"] = allocator.library_bytes()
    peaks = plain.peaks or {peak.phase: peak.allocated for peak in ledger.peaks}
    size, operator, code = ledger.largest
    sizes["largest_bytes"] = size
    notes = {"largest": f"{operator} at {code}"}
    attachments: dict[str, Any] = {
        "ledger": ledger.peaks,
        "ends": ledger.ends,
        "saved": _of_one_block(ledger.saved),
        "course": ledger.course.points(),
        "gradients": _of_two_blocks(ledger.gradients),
    }
    if standing:
        attachments["standing"] = standing
    if case.snapshot == "yes":
        notes |= _snapshot(step, device, case)
    return Measurement(
        series=plain.series(),
        quantities=(
            *step.quantities(),
            *peak_quantities(peaks, case, device.kind),
            *quantities({name: (size, "B") for name, size in sizes.items()}),
        ),
        notes=notes,
        attachments=attachments,
    )


def _context_and_libraries(workload: Workload, device: Device, allocator: CudaAllocator) -> int:
    """Bytes that the driver counts outside the allocator, before the model exists.

    CUDA loads a kernel when it is first launched, and which kernels a matmul uses depends on its
    shape: so the step runs once and is discarded. A small step then makes cuBLAS allocate its
    workspace again, in separate segments.
    """
    for planned in (workload, in_small(workload)):
        step = make_step(planned, device)
        step.run_phases()
        del step
        if planned is workload:
            # The cuBLAS workspace that earlier cases left does not belong to this case.
            allocator.library_bytes()
        device.synchronize()
        device.release()
    return allocator.driver_used() - allocator.reserved()


def in_small(workload: Workload) -> Workload:
    """The workload in a small size; of a user's model, whose shape is fixed, only the batch."""
    return msgspec.structs.replace(
        workload,
        size="tiny",
        table="2025",
        context=128,
        batch=1,
        overrides={},
        checkpoint=NONE,
        activation_policy=ALL,
    )


def _of_one_block(saved: Sequence[SavedTensor]) -> list[SavedTensor]:
    """Tensors of the first block, which stands for all: every block saves the same."""
    return [
        tensor
        for tensor in saved
        if not tensor.module.startswith("blocks.") or tensor.module.startswith("blocks.0.")
    ]


def _of_two_blocks(moments: Sequence[GradientMoment]) -> list[GradientMoment]:
    """Moments of the first two blocks: the memory between them is what one block changes."""
    return [one for one in moments if one.parameter.startswith(("blocks.0.", "blocks.1."))]


def _snapshot(step: TrainingStep, device: Device, workload: Workload) -> dict[str, str]:
    """Record a step with the allocator's history, stored in the folder of traces."""
    folder = os.environ.get(TRACES)
    if device.kind != "cuda" or not folder:
        return {}
    from stepscope.measure.allocator import recorded_history

    path = Path(folder) / f"{workload.key}.memory.pickle"
    try:
        step.reset()
        with recorded_history(path) as recording:
            step.run_phases()
            device.synchronize()
    except Exception as error:
        # The ledger is valid without a snapshot.
        return {"snapshot_missing": one_line(error)}
    notes = {"snapshot": path.name}
    if recording.overflowed:
        notes["snapshot_incomplete"] = "its buffer was full: earlier events were overwritten"
    return notes
