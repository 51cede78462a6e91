"""The flash study: speed, memory, accuracy and kernels of all attention implementations.

    stepscope run flash                       # the full study: for a GPU
    stepscope run flash --part race           # the implementations against each other
    stepscope run flash --part grid --attention sdpa tiled --context 128 --head-dim 64 --device cpu

The study has two parts. `grid` has one case for each implementation, dtype, length and head
dimension, with forward, backward and both in one record. `race` compares all implementations
interleaved on the same tensors: a GPU at its power limit lowers its clock, so only interleaved
times are comparable.

The full study takes an estimated 13 minutes on one H200: 5 minutes for the 420 eager cells of the
grid, 6 minutes for its 80 cells that torch compiles first, and 1.5 minutes for 16 comparisons.
`--attention triton sdpa_cudnn` leaves out most of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.records.schema import Record
from stepscope.report.blocks import Table
from stepscope.studies.base import Study
from stepscope.studies.flash.cases import (
    FlashCase,
    FlashFlags,
    grid_cases,
    race_cases,
)


class Flash(Study[FlashFlags, FlashCase]):
    name = "flash"
    title = "Attention implementations"
    question = (
        "How fast is each attention compared with the others and with the ceiling of this machine,"
        " how much memory does it take, how accurate is it, and which kernel ran?"
    )
    examples = (
        "stepscope run flash",
        "stepscope run flash --part race",
        "stepscope run flash --part grid race --attention sdpa tiled reference --dtype float32"
        " --context 128 512 --head-dim 64 --shape --race 1x4x256x64:float32"
        " --racers sdpa tiled auto",
    )
    flags = FlashFlags
    case = FlashCase
    no_model = "it measures attention alone"

    def cases(self, flags: FlashFlags) -> tuple[FlashCase, ...]:
        races = tuple(race_cases(flags)) if "race" in flags.part else ()
        return (
            # Short races include CPU time, and a profiler can slow later launches: they run first.
            *(race for race in races if race.is_short),
            *(grid_cases(flags) if "grid" in flags.part else ()),
            *(race for race in races if not race.is_short),
        )

    def headline(self, records: Sequence[Record]) -> Table | None:
        from stepscope.studies.flash.view import headline_table

        return headline_table(self.results(records))


STUDY = Flash()
