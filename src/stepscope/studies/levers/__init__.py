"""What are the six ways to make a device fast worth here, and what is this device made of?

    stepscope run levers
    stepscope run levers --lever coalescing tiling
    stepscope run levers --lever card

Each lever is one piece of work in a slow and a fast form that differ in one thing: control
divergence, precision, fusion, recomputation, coalesced access, tiling. `card` lists the device's
units, registers, caches and clocks. On a GPU the forms are Triton kernels, on a CPU calls of numpy
and torch on one core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stepscope.errors import UsageError, unknown_name
from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block, Table
from stepscope.studies.base import Bench, Measurement, PlannedCase, Study
from stepscope.studies.levers.catalog import LEVERS

CARD = "card"
NAMES = (CARD, *LEVERS)
_LARGEST_MIB = 8192
_ROWS_STEP = 256


class LeversFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What to try."""

    lever: tuple[str, ...] = NAMES
    """card, divergence, precision, fusion, recomputation, coalescing, tiling."""
    mib: int = 0
    """Size of an array that streams through memory, in MiB; 0: 512 on a GPU, 32 on a CPU. It shows
    the memory only where it is larger than the caches."""
    rows: int = 0
    """Rows of the matrices, a multiple of 256; 0: 4096 on a GPU (tiling takes half of them), 512 on
    a CPU."""
    warmup: int = 1
    """Rounds before the first sample."""
    rounds: int = 20
    """Samples of each form."""

    def __post_init__(self) -> None:
        for name in self.lever:
            if name not in NAMES:
                raise unknown_name("lever", name, NAMES)
        if not 0 <= self.mib <= _LARGEST_MIB:
            raise UsageError(f"mib is {self.mib}", f"give at most {_LARGEST_MIB}, or 0")
        if self.rows < 0 or self.rows % _ROWS_STEP:
            raise UsageError(f"rows is {self.rows}", f"give a multiple of {_ROWS_STEP}")
        if self.rounds < 1:
            raise UsageError(f"rounds is {self.rounds}", "it must be at least 1")
        if self.warmup < 0:
            raise UsageError(f"warmup is {self.warmup}", "it cannot be negative")


class Levers(Study[LeversFlags, Any]):
    name = "levers"
    title = "Levers"
    question = (
        "What does each of the six ways to make a device fast gain on this one, how near does it"
        " come to the limit, and what does the hardware do differently?"
    )
    examples = (
        "stepscope run levers",
        "stepscope run levers --lever coalescing tiling --rounds 50",
        "stepscope run levers --lever card",
    )
    flags = LeversFlags
    no_model = "it measures single kernels"

    def cases(self, flags: LeversFlags) -> tuple[PlannedCase, ...]:
        sizes = "".join(
            f"_{name}{value}" for name, value in (("m", flags.mib), ("r", flags.rows)) if value
        )
        return tuple(
            PlannedCase(study=self.name, key=CARD, config={"lever": CARD})
            if lever == CARD
            else PlannedCase(
                study=self.name,
                key=f"{lever}{sizes}",
                config={
                    "lever": lever, "mib": flags.mib, "rows": flags.rows,
                    "warmup": flags.warmup, "rounds": flags.rounds,
                },
            )
            for lever in flags.lever
        )  # fmt: skip

    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        from stepscope.studies.levers.measuring import measure_card, measure_lever

        return measure_card(bench) if config["lever"] == CARD else measure_lever(config, bench)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.levers.view import levers_blocks

        return levers_blocks(records)

    def headline(self, records: Sequence[Record]) -> Table | None:
        from stepscope.studies.levers.view import levers_table

        return levers_table(records, "headline")

    def presets(self, environment: Environment) -> Mapping[str, Sequence[LeversFlags]]:
        whole = LeversFlags(rounds=5 if environment.device_kind == "cpu" else 20)
        small = LeversFlags(mib=16, rounds=5) if environment.device_kind == "cpu" else whole
        return {"quick": (small,)} | dict.fromkeys(
            ("seeds", "cs336-2026", "h200", "full"), (whole,)
        )


STUDY = Levers()
