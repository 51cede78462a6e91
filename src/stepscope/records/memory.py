"""The memory ledger of a step as stored in a record: lines, phases, saved tensors."""

from __future__ import annotations

from stepscope.records.decoding import Int64
from stepscope.records.schema import Part

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
WEIGHT_COPIES = "autocast weight copies"
GATHERED = "parameters gathered from other ranks"
BUCKETS = "buckets of gradients"
INPUTS = "tokens, targets and tables"
GRAPH_INPUTS = "inputs of the CUDA graph"
ELSEWHERE = "other tensors of the program"
LOGITS = "logits"
TEMPORARIES = "temporaries"
WITHIN_OPERATORS = "within operators"
LIBRARIES = "cuBLAS work space"
ROUNDING = "blocks larger than requests"
RECOMPUTED = "activations run again"
"""Line of the activations that the backward pass recomputes in a checkpointed segment."""
KEPT_INPUT = "checkpoint, input"
"""Line of the saved input of a checkpointed segment, after `SAVED`."""
SAVED = "saved: "
"""Prefix of the lines of activations saved for backward; module and operator follow."""
SAVED_KIND = "saved for backward"
"""Kind of all lines with the prefix `SAVED`."""
MODEL_BUILT = "model built"
STEP_END = "step end"
"""Moments besides the ends of phases: before the first step, and after a step has freed its
tensors."""


class PhasePeak(Part, frozen=True):
    """The peak of a phase; `allocated` is reported by the allocator, or counted on a CPU."""

    phase: str
    allocated: Int64
    lines: dict[str, Int64]
    operator: str
    """The operator that reached the peak."""

    @property
    def unattributed(self) -> int:
        """Bytes that are not attributed to a line."""
        return self.allocated - sum(self.lines.values())


class Standing(Part, frozen=True):
    """Bytes of CUDA's allocator and driver at one moment."""

    allocated: Int64
    reserved: Int64
    driver: Int64
    """Memory in use on the entire device, as `nvidia-smi` shows it."""


class Point(Part, frozen=True):
    """Bytes of the tensors of each kind after an operator; `operator` is its number in the step."""

    phase: str
    operator: Int64
    kinds: dict[str, Int64]


class SavedTensor(Part, frozen=True):
    """A tensor that autograd saved for backward."""

    module: str
    operator: str
    shape: tuple[Int64, ...]
    dtype: str
    bytes: Int64
    code: str
    """File and line of the code that ran the operator."""
    times: Int64 = 1
    """Number of equal tensors in the same step, including this one."""


class GradientMoment(Part, frozen=True):
    """The moment at which the gradient of a parameter was complete."""

    parameter: str
    bytes: Int64
    live: Int64
    """Bytes of all live tensors at that moment, the gradient included."""


class Remedy(Part, frozen=True):
    """A change that is predicted to make the step fit."""

    words: str
    peak: Int64
    changes: dict[str, str | Int64]
    """Changed fields of the workload."""


class PostMortem(Part, frozen=True):
    """Analysis of a step that ran out of memory; all sizes in bytes."""

    limit: Int64
    """Memory available to the allocator: the device's memory without context and libraries, or a
    lower limit."""
    asked: Int64
    """Size of the failed request; 0 if the error does not report it."""
    held: Int64
    """Bytes allocated at that time; 0 if the allocator does not report them."""
    phase: str
    """The phase that is predicted to exceed the limit."""
    lines: dict[str, Int64]
    """Predicted bytes by line at that moment."""
    needed: Int64
    """The predicted peak."""
    remedies: tuple[Remedy, ...]

    @property
    def missing(self) -> int:
        return max(0, self.needed - self.limit)


Peaks = tuple[PhasePeak, ...]
Saved = tuple[SavedTensor, ...]
GradientMoments = tuple[GradientMoment, ...]
Course = tuple[Point, ...]


def kind_of(line: str) -> str:
    """The kind of a line; all lines that are saved for backward are one kind."""
    return SAVED_KIND if line.startswith(SAVED) else line


def saved_line(module: str, operator: str) -> str:
    """The line of what an operator saves, one for all blocks: `blocks.3.attention.query` counts as
    `attention`."""
    root, slash, below = module.rpartition("/")
    words = below.split(".")
    part = words[2] if len(words) > 2 and words[1].isdigit() else words[0]
    return f"{SAVED}{f'{root}{slash}{part}' or 'model'}, {operator}"


def saved_bytes(lines: dict[str, int]) -> int:
    return sum(size for line, size in lines.items() if line.startswith(SAVED))
