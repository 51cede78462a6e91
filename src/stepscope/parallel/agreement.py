"""What the ranks tell each other about a step, beside the gradients.

One small message of each rank: how many steps it has synchronized, the identity of its buckets,
which parameters have a gradient, what collectives it has issued. It travels on a gloo group of its
own, between hosts, so that it neither queues behind the gradients nor makes a GPU wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from stepscope.parallel.errors import ParallelError
from stepscope.parallel.heartbeat import HEARTBEAT
from stepscope.parallel.order import HINT, Order, require_same_pasts

_NAMED = 3
"""Parameters that an error names; the rest is counted."""
_STEP, _USE = 0, 1
"""What a word is said at: the end of a step, a collective that was not expected."""


class Word(NamedTuple):
    """What a rank says; numbers, because it travels as a tensor."""

    step: int
    identity: int
    kind: int
    digest: int
    """Of the sequence of its collectives, where that matters."""
    absent: int
    used: list[int]

    @classmethod
    def of(cls, numbers: list[int]) -> Word:
        step, identity, kind, digest, absent, *used = numbers
        return cls(step, identity, kind, digest, absent, used)


class Agreement:
    def __init__(
        self,
        group: dist.ProcessGroup | None,
        identity: int,
        names: Sequence[str],
        other: str,
        hint: str,
        order: Order | None = None,
    ) -> None:
        """`other` and `hint` are the words for a rank whose identity differs; `order` is there
        where the ranks must also issue their collectives in the same order."""
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._group = dist.new_group(
            ranks, backend="gloo", use_local_synchronization=group is not None
        )
        self._size = len(ranks)
        self._identity = identity
        self._names = names
        self._other, self._hint = other, hint
        self._order = order
        if order is not None:
            order.open(self._group.group_name, self._confirm)
        self.steps = 0
        self._gather(_STEP)

    def exchange(
        self, used: Sequence[bool], *, absent: bool = False, allow_missing: bool = False
    ) -> list[bool]:
        """By parameter: does any rank have a gradient? Raises where ranks would mix them."""
        if self._order is not None:
            self._order.ended = True
        said = self._gather(_STEP, absent, used)
        if self._order is not None:
            self._order.next_step()
        if not allow_missing:
            self._require_same_usage(said)
        self.steps += 1
        return [any(bits) for bits in zip(*(word.used for word in said), strict=True)]

    def _confirm(self) -> None:
        """Raise unless every rank is about to issue the same collective."""
        self._gather(_USE)

    def total(self, count: int) -> int:
        held = torch.tensor([count])
        with HEARTBEAT.waiting():
            dist.all_reduce(held, group=self._group)
        return int(held)

    def _gather(
        self, kind: int, absent: bool = False, used: Sequence[bool] = ()
    ) -> list[Word]:  # fmt: skip
        """Every rank's word. All have one length, so that ranks which differ still meet."""
        digest = self._order.digest if self._order is not None else 0
        flags = used or [False] * len(self._names)
        own = torch.tensor([self.steps, self._identity, kind, digest, absent, *flags])
        held = [torch.empty_like(own) for _ in range(self._size)]
        work = dist.all_gather(held, own, group=self._group, async_op=True)
        assert work is not None
        if self._order is not None:
            self._order.wait(work, on_host=True)
        else:
            with HEARTBEAT.waiting():
                work.wait()
        said = [Word.of(other.tolist()) for other in held]
        self._require_same_step(said)
        if any((word.kind, word.digest) != (said[0].kind, said[0].digest) for word in said):
            self._name_the_difference()
        return said

    def _name_the_difference(self) -> NoReturn:
        assert self._order is not None
        pasts = [self._order.past] * self._size
        dist.all_gather_object(pasts, self._order.past, group=self._group)
        require_same_pasts(dict(enumerate(pasts)))
        raise ParallelError("the ranks used the parameters in different orders", HINT)

    def _require_same_step(self, said: list[Word]) -> None:
        for rank, word in enumerate(said):
            if word.step != said[0].step:
                raise ParallelError(
                    f"rank {rank} synchronizes its step {word.step}, rank 0 its step"
                    f" {said[0].step}",
                    "every rank must call finish_gradient_synchronization once a step",
                )
            if word.identity != said[0].identity:
                raise ParallelError(f"rank {rank} has {self._other}", self._hint)

    def _require_same_usage(self, said: list[Word]) -> None:
        present = [rank for rank, word in enumerate(said) if not word.absent]
        for rank in present:
            for without, with_ in ((rank, present[0]), (present[0], rank)):
                missing = [
                    name
                    for name, own, other in zip(
                        self._names, said[without].used, said[with_].used, strict=True
                    )
                    if other and not own
                ]
                if not missing:
                    continue
                more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
                raise ParallelError(
                    f"rank {without} has no gradient of {', '.join(missing[:_NAMED])}{more},"
                    f" rank {with_} has",
                    "pass missing_gradients='zero' if ranks may use different parameters",
                )
