"""Errors of training on several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepscope.errors import StepscopeError


class ParallelError(StepscopeError):
    """Inconsistent ranks, or a wrapper that is used in the wrong order."""


class PeerLost(ParallelError):  # noqa: N818
    """Ranks do not answer: their process ended or hangs, or the network does not reach them.

    `ranks` has them as ranks of the job, `nodes` the nodes on which no rank answers.
    """

    def __init__(self, what: str, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        super().__init__(what, "check that their processes run, and the network between the nodes")
        self.ranks = tuple(ranks)
        self.nodes = tuple(nodes)


class RankFailed(ParallelError):  # noqa: N818
    """A rank ended the job. `stacks` maps ranks to their stack traces, where available."""

    def __init__(self, rank: int, step: int, what: str, stacks: Mapping[int, str]) -> None:
        where = f"at step {step}" if step >= 0 else "before its first step"
        super().__init__(f"rank {rank} {what} {where}")
        self.rank = rank
        self.step = step
        self.stacks = dict(stacks)
        if rank in stacks:
            self.add_note(f"stack of rank {rank}:\n{stacks[rank]}")
