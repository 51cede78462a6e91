"""What the ranks tell each other about a step, beside the gradients.

One small message of each rank: how many steps it has synchronized, the identity of its buckets,
which parameters have a gradient. It travels on a gloo group of its own,
between hosts, so that it neither queues behind the gradients nor makes a GPU wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from stepscope.parallel.errors import ParallelError
from stepscope.parallel.heartbeat import HEARTBEAT

_NAMED = 3
"""Parameters that an error names; the rest is counted."""


class Agreement:
    def __init__(
        self,
        group: dist.ProcessGroup | None,
        identity: int,
        names: Sequence[str],
        other: str,
        hint: str,
    ) -> None:
        """`other` and `hint` are the words for a rank whose identity differs."""
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._group = dist.new_group(
            ranks, backend="gloo", use_local_synchronization=group is not None
        )
        self._size = len(ranks)
        self._identity = identity
        self._names = names
        self._other, self._hint = other, hint
        self.steps = 0
        self._require_same_step(self._gather([self.steps, identity]))

    def exchange(
        self, used: Sequence[bool], *, absent: bool = False, allow_missing: bool = False,
        order: int = 0,
    ) -> list[bool]:  # fmt: skip
        """By parameter: does any rank have a gradient? Raises where ranks would mix them.

        `order` stands for the sequence of collectives since the last exchange.
        """
        said = self._gather([self.steps, self._identity, absent, order, *used])
        self._require_same_step(said)
        usage = [bits[4:] for bits in said]
        if not allow_missing:
            self._require_same_usage(usage, [rank for rank, bits in enumerate(said) if not bits[2]])
        for rank, bits in enumerate(said):
            if bits[3] != said[0][3]:
                raise ParallelError(
                    f"rank {rank} used the parameters in another order than rank 0",
                    "the forward of every rank must take the same way through the model",
                )
        self.steps += 1
        return [any(bits) for bits in zip(*usage, strict=True)]

    def total(self, count: int) -> int:
        held = torch.tensor([count])
        with HEARTBEAT.waiting():
            dist.all_reduce(held, group=self._group)
        return int(held)

    def _gather(self, message: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(message, dtype=torch.int64)
        held = [torch.empty_like(own) for _ in range(self._size)]
        with HEARTBEAT.waiting():
            dist.all_gather(held, own, group=self._group)
        return [other.tolist() for other in held]

    def _require_same_step(self, said: list[list[int]]) -> None:
        for rank, (step, identity, *_) in enumerate(said):
            if step != said[0][0]:
                raise ParallelError(
                    f"rank {rank} synchronizes its step {step}, rank 0 its step {said[0][0]}",
                    "every rank must call finish_gradient_synchronization once a step",
                )
            if identity != said[0][1]:
                raise ParallelError(f"rank {rank} has {self._other}", self._hint)

    def _require_same_usage(self, usage: list[list[int]], present: list[int]) -> None:
        for rank in present:
            missing = [
                name
                for name, own, first in zip(
                    self._names, usage[rank], usage[present[0]], strict=True
                )
                if own != first
            ]
            if missing:
                more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
                place = self._names.index(missing[0])
                without, with_ = (
                    (rank, present[0]) if usage[present[0]][place] else (present[0], rank)
                )
                raise ParallelError(
                    f"rank {without} has no gradient of {', '.join(missing[:_NAMED])}{more},"
                    f" rank {with_} has",
                    "pass missing_gradients='zero' if ranks may use different parameters",
                )
