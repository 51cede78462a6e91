"""Full training steps of Stepscope against the fastest variants of torch.compile.

    export STEPSCOPE_STUDIES=step_race PYTHONPATH=benchmarks
    stepscope run step-race --race 2.7b-2048

All variants run on the same weights in one process; then the energy of each side is measured alone.
On one H200 a comparison takes 2 to 4 minutes with `--scopes block --modes default`, plus a minute
for each variant that compiles the full model and several minutes for each variant with
`--modes max-autotune`. The next command on the same machine reuses the caches of torch.compile.
"""

from __future__ import annotations

from step_race.cases import RaceFlags, StepRaceCase, race_cases
from stepscope.studies.base import Study


class StepRaces(Study[RaceFlags, StepRaceCase]):
    name = "step-race"
    title = "The fastest training step against torch.compile"
    question = "How fast is a training step compared with the fastest variant of torch.compile?"
    examples = (
        "stepscope run step-race --race small-512 --modes default reduce-overhead",
        "stepscope run step-race --race tiny-64 --device cpu",
    )
    flags = RaceFlags
    case = StepRaceCase
    no_model = "its variants are those of Stepscope's own model; use `compile` or `advise`"

    def cases(self, flags: RaceFlags) -> tuple[StepRaceCase, ...]:
        return tuple(race_cases(flags))


STUDY = StepRaces()
