"""How fast and how exact is each attention, and which kernel is it?

    stepscope run flash                       # the whole study: for a GPU
    stepscope run flash --part race           # the implementations against each other
    stepscope run flash --part grid --attention sdpa tiled --seq 128 256 --head 64 --device cpu

Three parts. `grid`: one case for each implementation, format, length and head dimension, with
forward, backward and both in one record. `race`: every implementation on the same tensors in
turns, because a GPU under its power limit lowers its clock and only times taken in turns compare.
`tiles`: our kernels with every tile, to see what the chosen one is worth.

On one H200 the whole study is estimated at 16 minutes, by what a case costs: the grid's 420 cells
that are called as they are, 5 minutes; its 80 cells that torch compiles first, 6 minutes; 100 tiles
at 2 s, 3.5 minutes; 16 races, 1.5 minutes. `--attention triton sdpa_cudnn` leaves out most of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block, Table
from stepscope.studies.base import Bench, Measurement, Study
from stepscope.studies.flash.cases import (
    PUBLISHED_SHAPES,
    FlashCase,
    FlashFlags,
    grid_cases,
    race_cases,
    tile_cases,
)


class Flash(Study[FlashFlags, FlashCase]):
    name = "flash"
    title = "Attention, every implementation"
    question = (
        "How fast is each attention against the others and against this machine's limit,"
        " how much memory does it take, how exact is it, and which kernel ran?"
    )
    examples = (
        "stepscope run flash",
        "stepscope run flash --part race",
        "stepscope run flash --part grid race --attention sdpa tiled reference --dtype float32"
        " --seq 128 512 --head 64 --shape --race 1x4x256x64:float32 --racers sdpa tiled auto",
    )
    flags = FlashFlags
    case = FlashCase
    no_model = "it measures attention alone"

    def cases(self, flags: FlashFlags) -> tuple[FlashCase, ...]:
        races = tuple(race_cases(flags)) if "race" in flags.part else ()
        return (
            # The host's time counts in the short races: they run before a profiler ever did.
            *(race for race in races if race.is_short),
            *(grid_cases(flags) if "grid" in flags.part else ()),
            *(race for race in races if not race.is_short),
            *(tile_cases(flags) if "tiles" in flags.part else ()),
        )

    def measure(self, case: FlashCase, bench: Bench) -> Measurement:
        from stepscope.studies.flash.measure import measure_case

        return measure_case(case, bench)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.flash.view import flash_blocks

        return flash_blocks(records, self.results(records))

    def headline(self, records: Sequence[Record]) -> Table | None:
        from stepscope.studies.flash.view import headline_table

        return headline_table(self.results(records))

    def presets(self, environment: Environment) -> Mapping[str, Sequence[FlashFlags]]:
        if environment.device_kind == "cpu":
            quick = FlashFlags(
                part=("grid", "race"),
                attention=("reference", "tiled", "sdpa"),
                dtype=("float32",),
                seq=(128, 512),
                head=(64,),
                shape=(),
                race=("1x4x256x64:float32",),
                racers=("reference", "tiled", "sdpa", "auto"),
                rounds=8,
                race_seconds=0.0,
            )
        else:
            # Half a minute: nothing here is compiled by torch.
            quick = FlashFlags(
                part=("grid", "race"),
                attention=("triton", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "reference"),
                dtype=("bfloat16",),
                seq=(512, 2048, 8192),
                head=(64, 128),
                shape=(),
                race=PUBLISHED_SHAPES,
                racers=("triton", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "auto"),
            )
        # The write-ups hold their kernel against the naive form, and its leaderboard shape.
        course = FlashFlags(
            part=("grid",),
            attention=("triton", "sdpa_flash", "reference", "tiled"),
            shape=("1x16x16384x64",),
        )
        whole = FlashFlags()
        return {
            "quick": (quick,),
            "seeds": (course,),
            "cs336-2026": (course,),
            "h200": (whole,),
            "full": (whole,),
        }


STUDY = Flash()
