"""The allreduce study: time of collectives, and the bandwidth of the links.

    stepscope run allreduce --ranks 2 4 --collective all-reduce all-gather

The ranks start once per case; each sample times one collective after a barrier. (Timing the full
program would measure the seconds that processes take to start, at every size.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepscope.analysis.links import COLLECTIVES
from stepscope.records.schema import Environment
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
        return tuple(
            AllReduceCase(
                collective=collective,
                ranks=ranks,
                backend=backend,
                sizes=flags.sizes,
                rounds=flags.rounds,
            )
            for ranks in flags.ranks
            for backend in flags.backend
            for collective in flags.collective
        )

    def presets(self, environment: Environment) -> Mapping[str, Sequence[AllReduceFlags]]:
        seeds = (2**20, 2**22, 2**24, 2**26, 2**28, 2**30)
        all_collectives = COLLECTIVES
        if environment.device_kind == "cpu":
            quick = AllReduceFlags(ranks=(2,), sizes=(2**10, 2**14, 2**18, 2**22))
        else:
            quick = AllReduceFlags(ranks=(1,))
        # On one GPU: NCCL with one rank, and gloo between two ranks that share the GPU.
        short = tuple(2**power for power in range(10, 29, 6))
        return {
            "quick": (quick,),
            "seeds": (AllReduceFlags(ranks=(1, 2), sizes=seeds),),
            "cs336-2026": (AllReduceFlags(ranks=(2, 4, 6), sizes=seeds),),
            "h200": (
                AllReduceFlags(ranks=(1,), collective=all_collectives, sizes=short),
                AllReduceFlags(
                    ranks=(2,), backend=("gloo",), collective=all_collectives, sizes=short, rounds=5
                ),
            ),
            "full": (
                AllReduceFlags(
                    ranks=(1, 2, 3, 4, 5, 6),
                    collective=all_collectives,
                    sizes=tuple(2**power for power in range(10, 31, 2)),
                ),
            ),
        }


STUDY = AllReduce()
