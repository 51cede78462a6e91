"""The sharding study: memory and time of a step with a sharded optimizer.

    stepscope run sharding --size small --context 128 --ranks 2

Each strategy first runs a few steps, in which the bytes of its tensors are counted by kind and its
parameters are compared with those of one process; then all strategies run interleaved, with one in
memory at a time.
"""

from __future__ import annotations

from stepscope.studies.base import Study
from stepscope.studies.sharding.cases import ShardingFlags
from stepscope.training.ranks.subject import RankedStep


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


STUDY = Sharding()
