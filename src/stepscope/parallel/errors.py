"""What can go wrong between ranks."""

from __future__ import annotations

from collections.abc import Mapping

from stepscope.errors import StepscopeError


class ParallelError(StepscopeError):
    """Ranks that do not fit together, or a wrapper that is used in the wrong order."""


class RankFailed(ParallelError):  # noqa: N818
    """A rank ended the job. `stacks` holds what each rank was doing, as far as it could say."""

    def __init__(self, rank: int, step: int, what: str, stacks: Mapping[int, str]) -> None:
        where = f"at step {step}" if step >= 0 else "before its first step"
        super().__init__(f"rank {rank} {what} {where}")
        self.rank = rank
        self.step = step
        self.stacks = dict(stacks)
        if rank in stacks:
            self.add_note(f"rank {rank} was here:\n{stacks[rank]}")
