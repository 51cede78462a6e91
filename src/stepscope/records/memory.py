"""The account of a step's memory as a record's notes keep it: lines, phases, saved tensors."""

from __future__ import annotations

from stepscope.records.decoding import Int64
from stepscope.records.schema import Part

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
WEIGHT_COPIES = "autocast weight copies"
GATHERED = "parameters gathered from other ranks"
INPUTS = "tokens, targets and tables"
ELSEWHERE = "other tensors of the program"
LOGITS = "logits"
TEMPORARIES = "temporaries"
WITHIN_OPERATORS = "within operators"
LIBRARIES = "cuBLAS work space"
ROUNDING = "blocks larger than requests"
RECOMPUTED = "activations run again"
"""What a checkpointed stretch makes when the backward runs it again."""
KEPT_INPUT = "checkpoint, input"
"""Names the line of what a checkpointed stretch keeps, after `SAVED`."""
SAVED = "saved: "
"""Begins the lines of activations kept for backward; module and operator follow."""
SAVED_KIND = "saved for backward"
"""All of those lines together."""
MODEL_BUILT = "model built"
STEP_END = "step end"
"""Moments beside the ends of phases: before the first step, and when a step has let go of all."""


class PhasePeak(Part, frozen=True):
    """The peak of a phase: `allocated` is the allocator's, or on a CPU the count's."""

    phase: str
    allocated: Int64
    lines: dict[str, Int64]
    operator: str
    """The one that reached it."""

    @property
    def residual(self) -> int:
        """What is on no line."""
        return self.allocated - sum(self.lines.values())


class Standing(Part, frozen=True):
    """What CUDA's allocator and driver hold at one moment, in bytes."""

    allocated: Int64
    reserved: Int64
    driver: Int64
    """Of the whole device, as `nvidia-smi` shows it."""


class Point(Part, frozen=True):
    """What the tensors of each kind hold after an operator, by its number in the step."""

    phase: str
    operator: Int64
    kinds: dict[str, Int64]


class SavedTensor(Part, frozen=True):
    """One tensor that autograd keeps."""

    module: str
    operator: str
    shape: tuple[Int64, ...]
    dtype: str
    bytes: Int64
    code: str
    """File and line of the model that ran the operator."""
    times: Int64 = 1
    """Others like it in the same step, and itself."""


class Remedy(Part, frozen=True):
    """A change with which a step is predicted to fit."""

    words: str
    peak: Int64
    changes: dict[str, str | Int64]
    """Fields of the workload."""


class PostMortem(Part, frozen=True):
    """Of a step that ran out of memory; all sizes in bytes."""

    limit: Int64
    """What the allocator may hold: the device's memory without context and libraries, or less."""
    asked: Int64
    """The request that failed, 0 where the error does not say."""
    held: Int64
    """What was allocated then, by the allocator; 0 where it does not say."""
    phase: str
    """In which it is predicted to need more than there is."""
    lines: dict[str, Int64]
    """What holds the bytes at that moment, as predicted."""
    needed: Int64
    """The predicted peak."""
    remedies: tuple[Remedy, ...]

    @property
    def missing(self) -> int:
        return max(0, self.needed - self.limit)


Peaks = tuple[PhasePeak, ...]
Saved = tuple[SavedTensor, ...]
Course = tuple[Point, ...]


def kind_of(line: str) -> str:
    """Lines by kind: all that is saved for backward is one."""
    return SAVED_KIND if line.startswith(SAVED) else line


def saved_bytes(lines: dict[str, int]) -> int:
    return sum(size for line, size in lines.items() if line.startswith(SAVED))
