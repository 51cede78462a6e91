"""Errors of training on several ranks."""

from __future__ import annotations

from collections.abc import Mapping

from stepscope.errors import StepscopeError


class ParallelError(StepscopeError):
    """Inconsistent ranks, or a wrapper that is used in the wrong order."""


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
