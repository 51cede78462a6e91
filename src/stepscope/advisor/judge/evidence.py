"""Evidence of what a training script computes, as observed in its process. Does not need torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

EVIDENCE, GRADIENTS, WEIGHTS, GIVEN = "evidence.json", "gradients.npz", "weights.pt", "given.pt"
"""Files of an observation; `GIVEN` has weights of the other script, to be used in the probes."""

COUNTED_AFTER, PROBED_AFTER, PROBES = 2, 4, 3
"""Steps before those whose FLOPs are counted, and before those whose gradients are compared."""
SAMPLED_UP_TO = 20
"""Steps whose samples are recorded."""
FEWEST_STEPS = PROBED_AFTER + PROBES + 1


class Samples(msgspec.Struct, frozen=True):
    """What reached the model in one step, in any order. Rounding of floats changes little."""

    count: int
    elements: int
    exact: list[int]
    """A hash of the integers of each sample, sorted."""
    projections: list[list[float]]
    """Random projections of the floats of each sample, each sorted."""


class Parameter(msgspec.Struct, frozen=True):
    name: str
    shape: list[int]
    dtype: str


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was observed of one script."""

    steps: int = 0
    ended: bool = False
    """Whether the script ended before the last step that was asked for."""
    samples: dict[int, Samples] = {}
    """By step."""
    flops: float | None = None
    """Model FLOPs of a step: matmuls, convolutions, attention as if every pair were computed."""
    dtype: str = ""
    """Dtype with the most of them."""
    replays: bool = False
    """Whether CUDA graphs were replayed, whose operators cannot be seen."""
    parameters: list[Parameter] = []
    unlike: str = ""
    """Why the other script's weights could not be used."""
    noise: float | None = None
    """Relative difference of the model's gradients between two seeds, on the same batch."""
    blocked_ms: float | None = None
    """Time of a step in which the loop neither runs nor waits for a processor or its loader."""
    losses: list[float | None] = []
    """Of the probes, with the same weights."""
    folder: str = ""

    def file(self, name: str) -> Path:
        return Path(self.folder) / name
