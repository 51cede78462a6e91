"""The sharding study: memory and time of a step with a sharded optimizer.

    stepscope run sharding --size small --context 128 --ranks 2

Each strategy first runs a few steps, in which the bytes of its tensors are counted by kind and its
parameters are compared with those of one process; then all strategies run interleaved, with one in
memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepscope.records.schema import Environment
from stepscope.studies.base import Study
from stepscope.studies.ranks.subject import RankedStep
from stepscope.studies.sharding.cases import ShardingFlags


class Sharding(Study[ShardingFlags, RankedStep]):
    name = "sharding"
    title = "Sharded optimizer"
    question = "What does sharding the optimizer state among ranks save, and what does it cost?"
    examples = ("stepscope run sharding --size small --ranks 2",)
    flags = ShardingFlags
    case = RankedStep

    def cases(self, flags: ShardingFlags) -> tuple[RankedStep, ...]:
        return tuple(
            RankedStep(**subject, ranks=ranks, backend=flags.backend)
            for subject in flags.subjects((flags.context,))
            for ranks in flags.ranks
        )

    def presets(self, environment: Environment) -> Mapping[str, Sequence[ShardingFlags]]:
        quick = (
            ShardingFlags(size=("tiny",), context=32, rounds=5, ranks=(2,))
            if environment.device_kind == "cpu"
            else ShardingFlags(ranks=(1,))
        )
        return {
            "quick": (quick,),
            "seeds": (ShardingFlags(size=("medium",), ranks=(2,)),),
            "cs336-2026": (ShardingFlags(size=("xl",), table="2026", ranks=(2,)),),
            # Two ranks on one GPU need gloo: memory is representative, time is not.
            "h200": (
                ShardingFlags(ranks=(1,), rounds=5),
                ShardingFlags(ranks=(2,), backend="gloo", rounds=5),
            ),
            "full": (ShardingFlags(size=("small", "medium", "large"), ranks=(2, 4)),),
        }


STUDY = Sharding()
