"""The step of a user's program or model as the subject of a rehearsal.

A record of `inspect` has the times of the phases and the number of gradients, but not when each was
ready: they are assumed to be of equal size and to become ready evenly during the backward pass.
"""

from __future__ import annotations

from stepscope.analysis.rehearsal.memory import StepMemory
from stepscope.analysis.rehearsal.recording import Gradient, Recording
from stepscope.analysis.rehearsal.replay import Upkeep
from stepscope.analysis.trust import trust_of
from stepscope.parallel.buckets import Item
from stepscope.records.memory import GRADIENTS, OPTIMIZER, PARAMETERS
from stepscope.records.schema import Record
from stepscope.studies.own.cases import STUDY_NAME as OWN
from stepscope.studies.rehearsal.subject import Subject, device_bytes, relative_step
from stepscope.views.program.cases import STUDY_NAME as INSPECTED
from stepscope.views.program.rows import ProgramRecord

STUDIES = (INSPECTED, OWN)
_MIN_GRADIENTS = 64
_PER_BLOCK = 4
_ELEMENT_BYTES = 4


def inspected_subject(record: Record) -> Subject | None:
    """Return the subject of a recorded step; None if it lacks a trace or its parameters."""
    watched = ProgramRecord(record)
    summary, step_ms = watched.summary, watched.step_ms
    parameters = int(record.quantity("parameters") or 0)
    if summary is None or step_ms is None or not parameters or record.status != "ok":
        return None
    scale = step_ms / summary.wall_ms
    phases = {name: scale * ms for name, ms in summary.phases.items()}
    backward = phases.get("backward", 0.0) + phases.get("loss", 0.0)
    optimizer = phases.get("optimizer", 0.0)
    if backward <= 0:
        return None
    forward = max(0.0, step_ms - backward - optimizer)
    setting, copied = watched.setting, record.ceiling("memory.copy")
    blocks = setting.blocks if setting else int(record.quantity("blocks") or 0)
    tensors = sum(one.tensors for one in setting.optimizers) if setting else 0
    passes = forward + backward
    return Subject(
        name=watched.name,
        record=record.id,
        case=record.case,
        device=record.environment.device_name,
        recording=even_recording(
            forward,
            backward,
            optimizer,
            parameters,
            tensors or max(_MIN_GRADIENTS, _PER_BLOCK * blocks),
        ),
        gradients_timed=False,
        batch=float((setting.batch if setting else watched.case.batch) or 1),
        upkeep=Upkeep(pack_byte=2e3 / copied.value) if copied else Upkeep(),
        flops_per_s=(record.quantity("flops") or 0.0) / passes * 1e3,
        trust=trust_of(record),
        known=relative_step(record),
        memory=_memory(watched, parameters),
        device_bytes=device_bytes(record),
        program=watched.command,
    )


def even_recording(
    forward_ms: float,
    backward_ms: float,
    optimizer_ms: float,
    parameters: int,
    gradients: int = _MIN_GRADIENTS,
) -> Recording:
    """Return a recording whose gradients have equal sizes and become ready evenly, the last
    parameters of the model first."""
    count = min(gradients, parameters)
    ends = [parameters * (index + 1) // count for index in range(count)]
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return Recording(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        optimizer_ms=optimizer_ms,
        gradients=tuple(
            Gradient(
                item=Item(
                    name=f"part {index}", elements=size, element_bytes=_ELEMENT_BYTES, kind="even"
                ),
                ready=backward_ms * (count - index) / count,
            )
            for index, size in enumerate(sizes)
        ),
    )


def _memory(watched: ProgramRecord, parameters: int) -> StepMemory | None:
    peak = watched.record.quantity("peak_bytes")
    if not peak:
        return None
    account = watched.account
    if account is None:
        each = float(_ELEMENT_BYTES * parameters)
        return StepMemory(peak, each, each, 0.0)
    lines = account.highest.lines
    return StepMemory(peak, *(float(lines.get(n, 0)) for n in (PARAMETERS, GRADIENTS, OPTIMIZER)))
