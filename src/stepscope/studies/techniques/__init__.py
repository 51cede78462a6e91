"""The techniques study: gain of six optimization techniques, and the resources of the device.

    stepscope run techniques
    stepscope run techniques --technique coalescing tiling
    stepscope run techniques --technique card

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
from stepscope.studies.techniques.cases import CARD, TechniqueCase, TechniquesFlags


class Techniques(Study[TechniquesFlags, TechniqueCase]):
    name = "techniques"
    title = "Optimization techniques"
    question = (
        "What does each of six optimization techniques gain on this device, how close does it come"
        " to the ceiling, and what does the hardware do differently?"
    )
    examples = (
        "stepscope run techniques",
        "stepscope run techniques --technique coalescing tiling --rounds 50",
        "stepscope run techniques --technique card",
    )
    flags = TechniquesFlags
    case = TechniqueCase
    no_model = "it measures single kernels"

    def cases(self, flags: TechniquesFlags) -> tuple[TechniqueCase, ...]:
        return tuple(
            TechniqueCase(technique=CARD) if case.technique == CARD else case
            for case in TechniqueCase.combinations(flags, "technique")
        )

    def headline(self, records: Sequence[Record]) -> Table | None:
        from stepscope.studies.techniques.view import techniques_table

        return techniques_table(self.results(records), "headline")

    def presets(self, environment: Environment) -> Mapping[str, Sequence[TechniquesFlags]]:
        full = TechniquesFlags(rounds=5 if environment.device_kind == "cpu" else 20)
        small = TechniquesFlags(mib=16, rounds=5) if environment.device_kind == "cpu" else full
        return {"quick": (small,)} | dict.fromkeys(("seeds", "cs336-2026", "h200", "full"), (full,))


STUDY = Techniques()
