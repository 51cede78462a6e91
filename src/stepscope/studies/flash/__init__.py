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

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from stepscope.errors import UsageError
from stepscope.model.config import precision
from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block, Table
from stepscope.studies.base import Bench, Measurement, PlannedCase, Study
from stepscope.studies.flag_checks import check_seconds
from stepscope.studies.flash.cases import (
    PARTS,
    Part,
    Shape,
    grid_cases,
    is_short,
    left_out,
    race_cases,
    tile_cases,
)

PUBLISHED_SHAPES = (
    "1x16x16384x64", "4x16x4096x64", "4x16x4096x128", "2x16x16384x128", "8x16x1024x64",
)  # fmt: skip
MODEL_SHAPES = ("4x32x512x80", "4x32x2048x80")
MANY_HEADS = (*PUBLISHED_SHAPES, *MODEL_SHAPES, "1x16x4096x64:float32")
SHORT = tuple(f"1x1x{seq}x{head}" for head in (64, 128) for seq in (128, 256, 512, 1024))


class FlashFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: in the grid every combination of the values is a case."""

    part: tuple[Part, ...] = PARTS
    """grid, race, tiles."""
    attention: tuple[str, ...] = (
        "triton", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "compiled", "reference",
        "tiled",
    )  # fmt: skip
    """Implementations of the grid (`stepscope list attentions`)."""
    dtype: tuple[str, ...] = ("bfloat16", "float32")
    """bfloat16, float16, float32."""
    seq: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    """Sequence lengths of the grid, with batch 1 and one head."""
    head: tuple[int, ...] = (16, 32, 64, 128)
    """Head dimensions of the grid."""
    shape: tuple[str, ...] = MANY_HEADS
    """Further shapes of the grid: batch x heads x length x d, bfloat16 or as `:float32` says."""
    race: tuple[str, ...] = (*MANY_HEADS, *SHORT)
    """Shapes of the races."""
    racers: tuple[str, ...] = (
        "triton", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa", "flex", "auto",
    )  # fmt: skip
    """Implementations that race; one that cannot take a shape is noted."""
    tile_head: tuple[int, ...] = (64, 128)
    """Head dimensions of the tiles."""
    warmup: int = 2
    """Steps before the first sample."""
    steps: int = 5
    """Samples at least, of each pass in the grid."""
    min_seconds: float = 0.05
    """Go on sampling a pass until this much time has passed (at most 200 samples)."""
    rounds: int = 20
    """Rounds of a race at least."""
    race_seconds: float = 0.5
    """Go on racing until this much time has passed (at most 200 rounds)."""

    def __post_init__(self) -> None:
        for name in ("steps", "rounds"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", "it must be at least 1")
        if self.warmup < 0:
            raise UsageError(f"warmup is {self.warmup}", "it cannot be negative")
        check_seconds("min-seconds", self.min_seconds)
        check_seconds("race-seconds", self.race_seconds)


class Flash(Study[FlashFlags, Any]):
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
    no_model = "it measures attention alone"

    def cases(self, flags: FlashFlags) -> tuple[PlannedCase, ...]:
        cases: list[PlannedCase] = []
        # The host's time counts in the short races: they run before a profiler ever did.
        if "race" in flags.part:
            cases += self._races(flags, short=True)
        if "grid" in flags.part:
            cases += self._grid(flags)
        if "race" in flags.part:
            cases += self._races(flags, short=False)
        if "tiles" in flags.part:
            cases += tile_cases(self.name, flags.tile_head)
        return tuple(cases)

    def _races(self, flags: FlashFlags, *, short: bool) -> Iterator[PlannedCase]:
        shapes = [shape for text in flags.race if is_short(shape := Shape.parse(text)) == short]
        effort = {
            "warmup": flags.warmup, "rounds": flags.rounds, "min_seconds": flags.race_seconds,
        }  # fmt: skip
        return race_cases(self.name, shapes, flags.racers, effort)

    def _grid(self, flags: FlashFlags) -> tuple[PlannedCase, ...]:
        shapes = [
            *(
                Shape(batch=1, heads=1, seq=seq, head=head, dtype=precision(dtype).name)
                for dtype, seq, head in itertools.product(flags.dtype, flags.seq, flags.head)
            ),
            *(Shape.parse(text) for text in flags.shape),
        ]
        effort = {
            "warmup": flags.warmup, "steps": flags.steps, "min_seconds": flags.min_seconds,
        }  # fmt: skip
        cases = grid_cases(self.name, flags.attention, shapes, effort)
        reasons = [left_out(*cell) for cell in itertools.product(flags.attention, shapes)]
        if reasons and not cases:
            raise UsageError(f"the grid is empty: {reasons[0]}", "choose other values")
        return cases

    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        if config["kind"] == "grid":
            from stepscope.studies.flash.grid import measure_grid

            return measure_grid(config, bench)
        if config["kind"] == "race":
            from stepscope.studies.flash.race import measure_race

            return measure_race(config, bench)
        from stepscope.studies.flash.tiles import measure_tiles

        return measure_tiles(config, bench)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.flash.view import flash_blocks

        return flash_blocks(records)

    def headline(self, records: Sequence[Record]) -> Table | None:
        from stepscope.studies.flash.view import headline_table

        return headline_table(records)

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
