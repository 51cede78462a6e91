"""How close to the limit can one training step get, and what does each change bring?

    stepscope run step --size small --context 512       # ladder, loss curves, waterfall
    stepscope run step --part race --race 2.7b-2048     # against torch.compile, in turns

Four parts. `ladder`: from the plainest step (eager, float32, attention written out) each change
alone and on top of those before it. `loss`: the same rungs trained on a text that can be learnt,
held against the float32 curve. `waterfall`: the first and the fastest step traced, from the ideal
time of their operations up to the measured time, by cause. `race`: ours against the fastest of
torch.compile's forms, in turns on the same weights; then each on its own for its energy.

On one H200, estimated by what a case costs: the ladder of small 1.5 minutes, of 2.7b at context
2048 2 minutes; the loss curves 7 minutes; the waterfalls 2 minutes; a race 2 to 4 minutes with
`--scopes block --modes default`, a minute more for each form that is compiled whole, several for
each with `--modes max-autotune`. What torch.compile made is found again in its caches by the next
command on the same machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurement, Study
from stepscope.studies.step.cases import (
    PARTS,
    LossCase,
    RungCase,
    StepCase,
    StepFlags,
    ladder_cases,
    loss_cases,
    race_cases,
    waterfall_cases,
)
from stepscope.studies.step.ladder import RUNGS, START, applies


class Step(Study[StepFlags, StepCase]):
    name = "step"
    title = "The fast step"
    question = (
        "What does each change bring on the way from the plainest step to the fastest,"
        " does the model still learn the same, and what keeps the step from its limit?"
    )
    examples = (
        "stepscope run step",
        "stepscope run step --part ladder waterfall --size 2.7b --context 2048",
        "stepscope run step --part race --race small-512 --modes default reduce-overhead",
        "stepscope run step --part ladder waterfall --size tiny --context 64 --device cpu",
    )
    flags = StepFlags
    case = StepCase
    goes_on = True
    on_cpu = "quick"
    no_model = "its ladder swaps parts that only the model here has; use `compile` or `advise`"

    def cases(self, flags: StepFlags) -> tuple[StepCase, ...]:
        # The host's time counts in small races: they run before a profiler ever did.
        return (
            *(race_cases(flags) if "race" in flags.part else ()),
            *(ladder_cases(flags) if "ladder" in flags.part else ()),
            *(loss_cases(flags) if "loss" in flags.part else ()),
            *(waterfall_cases(flags) if "waterfall" in flags.part else ()),
        )

    def cases_here(self, flags: StepFlags, lacks: Collection[str]) -> tuple[StepCase, ...]:
        """A change that does not apply is not part of later rungs: it has a row of its own."""
        every = self.cases(flags)
        absent = {name for name in RUNGS if not applies(name, lacks)}
        if not absent & {*flags.rungs, *flags.loss_rungs}:
            return every

        def sweep(skipped: bool, **fields: Any) -> Iterator[StepCase]:
            rungs = {
                name: tuple(rung for rung in getattr(flags, name) if (rung in absent) is skipped)
                for name in ("rungs", "loss_rungs")
            }
            for case in self.cases(msgspec.structs.replace(flags, loss_only=(), **rungs, **fields)):
                only = flags.loss_only
                if not only or not isinstance(case, LossCase) or case.rung in only:
                    yield case

        parts = tuple(part for part in flags.part if part in ("ladder", "loss"))
        rows = sweep(True, part=parts, how=("alone",), seeds=flags.seeds[:1])
        return (
            *sweep(False),
            *(row for row in rows if isinstance(row, RungCase) and row.rung != START),
        )

    def measure(self, case: StepCase, bench: Bench) -> Measurement:
        from stepscope.studies.step.measure import measure_case

        return measure_case(case, bench)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.step.view import step_blocks

        return step_blocks(self.results(records))

    def presets(self, environment: Environment) -> Mapping[str, Sequence[StepFlags]]:
        if environment.device_kind == "cpu":
            quick = [
                StepFlags(
                    part=PARTS,
                    size=("tiny",),
                    context=(64,),
                    batch=(2,),
                    # Compiling would take longer than all others.
                    rungs=tuple(name for name in RUNGS if name != "compile"),
                    race=("tiny-64",),
                    loss_size="tiny",
                    loss_context=32,
                    loss_steps=40,
                    words=16,
                    loss_rungs=("flash", "fused-loss"),
                    seeds=(0,),
                    vocab=1024,
                    warmup=1,
                    steps=5,
                    min_seconds=0.0,
                    rounds=5,
                    blocks=6,
                    block_seconds=0.1,
                )
            ]
        else:
            quick = [StepFlags(part=("ladder", "waterfall"))]
        return {
            "quick": quick,
            "seeds": (StepFlags(part=("ladder",)),),
            "cs336-2026": (StepFlags(part=("ladder",), table="2026"),),
            "h200": published(),
            "full": (*published(), StepFlags(part=("ladder",), size=("medium", "large"))),
        }


def published() -> tuple[StepFlags, ...]:
    """What matters most first: a machine may be lent for minutes only."""
    return (
        StepFlags(part=("race",), race=("small-512", "xl-512")),
        StepFlags(part=("race",), race=("2.7b-2048", "2.7b-512", "xl-2048")),
        # Compiled whole it would run out of the time of a case.
        StepFlags(
            part=("race",), race=("8b-32768",), scopes=("block",), modes=("default",), rounds=3
        ),
        StepFlags(part=("ladder", "waterfall")),
        StepFlags(part=("loss",)),
        StepFlags(part=("ladder", "waterfall"), size=("2.7b",), context=(2048,), warmup=3, steps=5),
    )


STUDY = Step()
