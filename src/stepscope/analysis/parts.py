"""Parts of the breakdown of a step: code, name and definition of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

IDEAL = "hardware limit"
MATMULS = "matmuls"
SLOW_MATMULS = "matmuls beyond the limit"
MEMORY = "memory-bound operations"
COPIES = "casts and copies"
OPTIMIZER = "optimizer"
COMMUNICATION = "exposed communication"
IDLE = "device idle"
LOADER = "DataLoader"
OUTSIDE = "outside the model"
RECOMPUTATION = "recomputation"
UNATTRIBUTED = "not attributed"
OTHER = "other"


class PartKind(NamedTuple):
    code: str
    """Stable name, for `--json`."""
    definition: str


KINDS: dict[str, PartKind] = {
    IDEAL: PartKind(
        "limit",
        "time of the step's matmuls at the rate measured here for the fastest dtype that a change"
        " could give them, plus the optimizer's bytes moved once; never more than the step took"
        " for the same work",
    ),
    MATMULS: PartKind(
        "matmuls",
        "time in matmuls, attention, convolutions and recurrent layers, where no rate of this"
        " machine is known",
    ),
    SLOW_MATMULS: PartKind(
        "matmuls-beyond-limit",
        "time of matmuls, attention, convolutions and recurrent layers above the hardware limit: a"
        " dtype that is not the fastest, small or uneven shapes, slow kernels. MFU compares with"
        " the rate of the step's own dtype, this part with that of the fastest, so both can be"
        " high",
    ),
    MEMORY: PartKind(
        "memory-bound",
        "elementwise operations, norms, softmax, reductions: they take as long as moving their"
        " bytes, or as launching them",
    ),
    COPIES: PartKind("copies", "casts between dtypes, changes of layout, copies from and to a GPU"),
    OPTIMIZER: PartKind("optimizer", "the update beyond the time of moving its bytes once"),
    COMMUNICATION: PartKind(
        "communication", "communication between ranks during which the device computes nothing"
    ),
    IDLE: PartKind(
        "idle",
        "on a GPU, the time in which it runs nothing: it waits for launches, for the CPU or for"
        " data. On a CPU, the time between operators: Python and PyTorch's own code",
    ),
    LOADER: PartKind("loader", "the loop waits for the next batch of its DataLoader"),
    OUTSIDE: PartKind(
        "outside",
        "operations outside of forward, backward and optimizer: batches, clipping, logging",
    ),
    RECOMPUTATION: PartKind(
        "recomputation", "operations of checkpointed segments that run again in the backward pass"
    ),
    UNATTRIBUTED: PartKind(
        "unattributed",
        "time of the step that the trace assigns to no other part, or that traced steps lack",
    ),
    OTHER: PartKind("other", "the smaller parts together"),
}


def part_names(matmuls: Sequence[str] = (), *, on_gpu: bool = True) -> dict[str, str]:
    """Return the names of the parts of one step, where they differ: `matmuls` is what it has of
    matmuls, attention, convolutions and recurrent layers. On a CPU no device is idle."""
    words = (
        " and ".join((", ".join(matmuls[:-1]), matmuls[-1])) if matmuls[1:] else "".join(matmuls)
    )
    names = {MATMULS: words, SLOW_MATMULS: f"{words} beyond the limit"} if words else {}
    return names if on_gpu else names | {IDLE: "between operators"}


DEFINITIONS = {kind.code: kind.definition for kind in KINDS.values()}
"""By code."""
