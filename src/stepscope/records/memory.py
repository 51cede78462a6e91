"""The account of a step's memory as a record's notes keep it: lines, phases, saved tensors."""

from __future__ import annotations

import msgspec

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


class PhasePeak(Part, frozen=True):
    """The peak of a phase: `allocated` is the allocator's, or on a CPU the count's."""

    phase: str
    allocated: int
    lines: dict[str, int]
    operator: str
    """The one that reached it."""

    @property
    def residual(self) -> int:
        """What is on no line."""
        return self.allocated - sum(self.lines.values())


class SavedTensor(Part, frozen=True):
    """One tensor that autograd keeps."""

    module: str
    operator: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    code: str
    """File and line of the model that ran the operator."""


def decode_peaks(note: str) -> tuple[PhasePeak, ...]:
    return msgspec.json.decode(note, type=tuple[PhasePeak, ...])


def decode_saved(note: str) -> tuple[SavedTensor, ...]:
    return msgspec.json.decode(note, type=tuple[SavedTensor, ...])


def saved_bytes(lines: dict[str, int]) -> int:
    return sum(size for line, size in lines.items() if line.startswith(SAVED))
