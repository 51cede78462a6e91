"""The step of a user's program or model as the subject of a rehearsal.

A record of `inspect` has the times of the phases and the number of gradients, but not when each was
ready: they are assumed to be of equal size and to become ready evenly during the backward pass. Of
a rank of several it has what the rank computes, and its share of what is sharded.
"""

from __future__ import annotations

from stepscope.analysis.rehearsal.memory import StepMemory
from stepscope.analysis.rehearsal.recording import ELEMENT_BYTES, even_recording
from stepscope.analysis.rehearsal.replay import Upkeep
from stepscope.analysis.trust import trust_of
from stepscope.records.memory import GRADIENTS, OPTIMIZER, PARAMETERS
from stepscope.records.schema import Record
from stepscope.studies.own.cases import STUDY_NAME as OWN
from stepscope.studies.rehearsal.subject import Subject, device_bytes, relative_step
from stepscope.views.program.cases import STUDY_NAME as INSPECTED
from stepscope.views.program.rows import ProgramRecord

STUDIES = (INSPECTED, OWN)
_MIN_GRADIENTS = 64
_PER_BLOCK = 4


def inspected_subject(record: Record) -> Subject | None:
    """Return the subject of a recorded step; None if it lacks a trace or its parameters."""
    watched = ProgramRecord(record)
    summary, step_ms = watched.summary, watched.step_ms
    parameters = int(record.quantity("parameters") or 0)
    if summary is None or step_ms is None or not parameters or record.status != "ok":
        return None
    setting, copied = watched.setting, record.ceiling("memory.copy")
    sharing = None if setting is None else setting.sharing
    shares = watched.case.ranks if sharing is not None and sharing.kind == "fsdp2" else 1
    scale = step_ms / summary.wall_ms

    def computed_ms(phase: str) -> float:
        """Time of a phase without the communication that a rank of several waits for."""
        waits = summary.class_ms("communication", phase)
        return scale * max(0.0, summary.phases.get(phase, 0.0) - waits)

    backward = computed_ms("backward") + computed_ms("loss")
    optimizer = computed_ms("optimizer")
    if backward <= 0:
        return None
    waits = scale * summary.class_ms("communication")
    forward = max(0.0, step_ms - waits - backward - optimizer)
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
            # Of sharded parameters a rank updates its share.
            shares * optimizer,
            parameters,
            tensors or max(_MIN_GRADIENTS, _PER_BLOCK * blocks),
        ),
        gradients_timed=False,
        batch=float((setting.batch if setting else watched.case.batch) or 1),
        upkeep=Upkeep(pack_byte=2e3 / copied.value) if copied else Upkeep(),
        flops_per_s=(record.quantity("flops") or 0.0) / passes * 1e3,
        trust=trust_of(record),
        known=relative_step(record),
        memory=_memory(watched, parameters, shares),
        device_bytes=device_bytes(record),
        program=watched.command,
    )


def _memory(watched: ProgramRecord, parameters: int, shares: int) -> StepMemory | None:
    """Return the memory of the step on one device, of which a rank has one of so many shares."""
    peak = watched.record.quantity("peak_bytes")
    if not peak:
        return None
    account = watched.account
    each = float(ELEMENT_BYTES * parameters) / shares
    kept: tuple[float, ...] = (each, each, 0.0)
    if account is not None:
        lines = account.highest.lines
        kept = tuple(float(lines.get(name, 0)) for name in (PARAMETERS, GRADIENTS, OPTIMIZER))
    return StepMemory(peak + (shares - 1) * sum(kept), *(shares * one for one in kept))
