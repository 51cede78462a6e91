"""Rounding error of sums in each dtype, and the accumulator dtype of this device's matmuls.

    stepscope run accumulation

`sum` cases add the same small number repeatedly; `dot` cases multiply long rows on the device;
`square` cases square numbers near the ends of each dtype's range; `halves` compares the gradient of
a batch with the mean of those of its halves. No case takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepscope.records.schema import Environment
from stepscope.studies.accumulation.cases import (
    HALVES,
    SQUARES,
    SUMS,
    AccumulationCase,
    AccumulationFlags,
    DotCase,
    HalvesCase,
    SquareCase,
    SumCase,
)
from stepscope.studies.base import Study


class Accumulation(Study[AccumulationFlags, AccumulationCase]):
    name = "accumulation"
    title = "Accumulation"
    question = (
        "How far is a sum from the exact value in each dtype, when does it stop growing,"
        " and in which dtype does the matmul accumulate?"
    )
    examples = (
        "stepscope run accumulation",
        "stepscope run accumulation --term 0.001 --count 20000",
    )
    flags = AccumulationFlags
    case = AccumulationCase
    no_model = "it measures sums in each dtype"

    def cases(self, flags: AccumulationFlags) -> tuple[AccumulationCase, ...]:
        return (
            *(
                SumCase(terms=terms, accumulator=accumulator, term=flags.term, count=flags.count)
                for terms, accumulator in SUMS
            ),
            *(DotCase(format=dtype, length=flags.length) for dtype in flags.format),
            *(SquareCase(format=dtype) for dtype in SQUARES),
            HalvesCase(rows=HALVES[0], width=HALVES[1]),
        )

    def presets(self, environment: Environment) -> Mapping[str, Sequence[AccumulationFlags]]:
        on_gpu = ("tf32",) if environment.device_kind == "cuda" else ()
        flags = (AccumulationFlags(format=("float32", *on_gpu, "float16", "bfloat16")),)
        return dict.fromkeys(("quick", "seeds", "cs336-2026", "h200", "full"), flags)


STUDY = Accumulation()
