"""The allreduce study: time of collectives, and the bandwidth of the links.

    stepscope run allreduce --ranks 2 4 --collective all-reduce all-gather

The ranks start once per case; each sample times one collective after a barrier. (Timing the full
program would measure the seconds that processes take to start, at every size.)
"""

from __future__ import annotations

from stepscope.studies.allreduce.cases import AllReduceCase, AllReduceFlags
from stepscope.studies.base import Study


class AllReduce(Study[AllReduceFlags, AllReduceCase]):
    name = "allreduce"
    title = "Collectives"
    question = "How long do collectives take at each size, and what bandwidth do the links reach?"
    examples = (
        "stepscope run allreduce --ranks 2 4 --sizes 1048576 67108864",
        "stepscope run allreduce --collective all-gather reduce-scatter broadcast",
    )
    flags = AllReduceFlags
    case = AllReduceCase
    no_model = "it measures collectives alone"

    def cases(self, flags: AllReduceFlags) -> tuple[AllReduceCase, ...]:
        return (*AllReduceCase.combinations(flags, "ranks", "backend", "collective"),)


STUDY = AllReduce()
