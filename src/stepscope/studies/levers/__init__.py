"""The levers study: gain of six optimization techniques, and the resources of the device.

    stepscope run levers
    stepscope run levers --lever coalescing tiling
    stepscope run levers --lever card

Each technique is one computation in a slow and a fast variant: control divergence, precision,
fusion, recomputation, coalesced access, tiling. `card` lists the units,
registers, caches and clocks of the device. On a GPU the variants are Triton kernels, on a CPU calls
of NumPy and torch on one core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Table
from stepscope.studies.base import Study
from stepscope.studies.levers.cases import CARD, LeverCase, LeversFlags


class Levers(Study[LeversFlags, LeverCase]):
    name = "levers"
    title = "Optimization techniques"
    question = (
        "What does each of six optimization techniques gain on this device, how close does it come"
        " to the ceiling, and what does the hardware do differently?"
    )
    examples = (
        "stepscope run levers",
        "stepscope run levers --lever coalescing tiling --rounds 50",
        "stepscope run levers --lever card",
    )
    flags = LeversFlags
    case = LeverCase
    no_model = "it measures single kernels"

    def cases(self, flags: LeversFlags) -> tuple[LeverCase, ...]:
        return tuple(
            LeverCase(lever=lever)
            if lever == CARD
            else LeverCase(
                lever=lever,
                mib=flags.mib,
                rows=flags.rows,
                warmup=flags.warmup,
                rounds=flags.rounds,
            )
            for lever in flags.lever
        )

    def headline(self, records: Sequence[Record]) -> Table | None:
        from stepscope.studies.levers.view import levers_table

        return levers_table(self.results(records), "headline")

    def presets(self, environment: Environment) -> Mapping[str, Sequence[LeversFlags]]:
        full = LeversFlags(rounds=5 if environment.device_kind == "cpu" else 20)
        small = LeversFlags(mib=16, rounds=5) if environment.device_kind == "cpu" else full
        return {"quick": (small,)} | dict.fromkeys(("seeds", "cs336-2026", "h200", "full"), (full,))


STUDY = Levers()
